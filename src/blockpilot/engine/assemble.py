"""From the engine's settings and the text of `--drafter` to a target and a drafter that fits it, on their device."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from blockpilot.core.config import EngineConfig
from blockpilot.core.device import Placement, resolve_device
from blockpilot.core.errors import InputError
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.eagle3_drafter import Eagle3Drafter
from blockpilot.decoding.ngram import NgramDrafter
from blockpilot.decoding.target import TargetRunner
from blockpilot.gpu.device import can_fuse
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.eagle3 import GpuEagle3Drafter
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.loading import check_fit, load_drafter
from blockpilot.models.packing import choose_backend, pack_linear

Model = TypeVar("Model", bound=nn.Module)


def place_target(decoder: Decoder, config: EngineConfig) -> Placement:
    """Move a target to the engine's device. Returns the settings as they hold for it on this machine."""
    device, dtype = resolve_device(config.device), getattr(torch, config.dtype)
    requested, limit = config.context_length, decoder.config.context_length
    if requested is not None and requested > limit:
        raise InputError(f"context_length {requested} is beyond the target's {limit}")
    placement = Placement(
        num_slots=config.num_slots,
        context_length=requested or limit,
        device=device,
        dtype=dtype,
        linear_backend=choose_backend(config.linear_backend, device, dtype),
    )
    _place(decoder, placement)
    return placement


def build_drafter(
    spec: str | Drafter | DFlash | Eagle3 | None, decoder: Decoder, placement: Placement
) -> Drafter | None:
    """`ngram`, a folder or hub id with a drafter's checkpoint, a loaded model, or a ready drafter. None: no drafter."""
    if spec is None or spec == "none":
        return None
    if spec == "ngram":
        return NgramDrafter()
    num_layers = decoder.config.num_layers
    model = load_drafter(spec, placement.dtype, num_target_layers=num_layers) if isinstance(spec, str) else spec
    if not isinstance(model, DFlash | Eagle3):
        return model
    name = Path(spec).name if isinstance(spec, str) else type(model).__name__.lower()
    check_fit(model.config, decoder.config, name)
    is_fused = can_fuse(placement.device, model.config.layers.head_dim, placement.dtype)
    if isinstance(model, Eagle3):
        make = GpuEagle3Drafter if is_fused else Eagle3Drafter
        return make(_place(model, placement), placement, embed=decoder.embed_tokens, name=name)
    head = _draft_head(model, decoder, placement.linear_backend)
    kind = GpuDFlashDrafter if is_fused else DFlashDrafter
    return kind(_place(model, placement), placement, embed=decoder.embed_tokens, head=head, name=name)


def build_runner(decoder: Decoder, placement: Placement) -> TargetRunner:
    """With recorded passes where the GPU can run them. On a GPU one of PyTorch's attention backends is switched off."""
    if placement.device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for a tenth of a second, for every length it meets
    is_fused = can_fuse(placement.device, decoder.config.head_dim, placement.dtype)
    return (GpuTargetRunner if is_fused else TargetRunner)(decoder, placement)


def _place(model: Model, placement: Placement) -> Model:
    return model.to(device=placement.device, dtype=placement.dtype).eval().requires_grad_(False)


def _draft_head(model: DFlash, decoder: Decoder, backend: str) -> Callable[[Tensor], Tensor]:
    """The target's head, or the rows of it that the drafter looks at. Call before the target's weights are packed."""
    if model.draft_token_ids is None and backend == "plain":
        return decoder.lm_head
    if model.draft_token_ids is None:
        return lambda hidden: decoder.lm_head(hidden)  # looked up late: packing replaces the layer
    ids = model.draft_token_ids
    rows = decoder.lm_head.weight[ids.to(decoder.lm_head.weight.device)]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    if (codes := getattr(decoder.lm_head, "block_codes", None)) is not None:
        head.block_codes = codes.rows(ids.cpu().numpy())
    return pack_linear(head, backend)
