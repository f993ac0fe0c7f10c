"""From the engine's settings and the text of `--drafter` to a target and a drafter that fits it, on their device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from blockpilot.core.config import EngineConfig
from blockpilot.core.device import Placement, resolve_device, torch_dtype
from blockpilot.core.errors import InputError
from blockpilot.cpu.dflash import CpuDFlashDrafter
from blockpilot.cpu.target import CpuTargetRunner
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
from blockpilot.models.loading import LoadedTarget, check_fit, load_drafter
from blockpilot.models.memory import require_engine_room
from blockpilot.models.packing import choose_backend, pack_linear, rows_of, why_unpackable

Model = TypeVar("Model", bound=nn.Module)


def settle_dtype(config: EngineConfig, target: LoadedTarget) -> EngineConfig:
    """The settings with the dtype that the target runs in."""
    if config.dtype == "auto":
        return replace(config, dtype=str(target.dtype).removeprefix("torch."))
    if (config.dtype == "int8") != (target.dtype == torch.int8):
        raise InputError(f"the target was loaded for {target.dtype}, not for {config.dtype}: load it again")
    return config


def place_target(decoder: Decoder, config: EngineConfig) -> Placement:
    """Move a target to the engine's device. Returns the settings as they hold for it on this machine."""
    device, dtype = resolve_device(config.device), torch_dtype(config.dtype) or torch.float32
    requested, limit = config.context_length, decoder.config.context_length
    if requested is not None and requested > limit:
        raise InputError(f"context_length {requested} is beyond the target's {limit}")
    placement = Placement(
        num_slots=config.num_slots,
        context_length=requested or limit,
        device=device,
        dtype=torch.float32 if dtype == torch.int8 else dtype,  # of activations and caches
        linear_backend=choose_backend(config.linear_backend, device, dtype),
        own_shapes=config.own_shapes,
    )
    is_placed = decoder.embed_tokens.weight.device.type == device.type
    require_engine_room(
        decoder.config, placement, token_budget=config.token_budget, name="the target", is_placed=is_placed
    )
    if placement.linear_backend != "int8":  # codes have no values to move
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
    kind: type[DFlashDrafter] = GpuDFlashDrafter if is_fused else DFlashDrafter
    if placement.linear_backend == "int8" and why_unpackable(model.config.layers) is None:
        kind = CpuDFlashDrafter
    return kind(_place(model, placement), placement, embed=decoder.embed_tokens, head=head, name=name)


def build_runner(decoder: Decoder, placement: Placement) -> TargetRunner:
    """With recorded passes where the GPU can run them. On a GPU one of PyTorch's attention backends is switched off."""
    if placement.linear_backend == "int8":
        return CpuTargetRunner(decoder, placement)
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
        return _LateHead(decoder)
    return pack_linear(rows_of(decoder.lm_head, model.draft_token_ids), backend)


@dataclass(frozen=True)
class _LateHead:
    """The target's head, looked up when it runs: packing replaces the layer."""

    decoder: Decoder

    @property
    def layer(self) -> nn.Module:
        return self.decoder.lm_head

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.decoder.lm_head(hidden)
