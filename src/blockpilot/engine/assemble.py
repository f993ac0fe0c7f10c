"""From the text of `--drafter` to a drafter that fits its target."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from blockpilot.core.config import EngineConfig
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
from blockpilot.models import dflash_format, eagle3_format
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.loading import resolve_folder
from blockpilot.models.packing import pack_linear
from blockpilot.models.weights import read_config

Model = TypeVar("Model", bound=nn.Module)


def build_drafter(
    spec: str | Drafter | DFlash | Eagle3 | None,
    decoder: Decoder,
    *,
    config: EngineConfig,
    context_length: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> Drafter | None:
    """`ngram`, a folder or hub id with a drafter's checkpoint, a loaded model, or a ready drafter. None: no drafter."""
    if spec is None or spec == "none":
        return None
    if spec == "ngram":
        return NgramDrafter()
    name = Path(spec).name if isinstance(spec, str) else None
    model = load_draft_model(spec, decoder, dtype) if isinstance(spec, str) else spec
    if not isinstance(model, DFlash | Eagle3):
        return model
    options: dict[str, Any] = {
        "embed": decoder.embed_tokens,
        "num_slots": config.num_slots,
        "context_length": context_length,
        "device": device,
        "dtype": dtype,
        "linear_backend": backend,
    }
    if isinstance(model, Eagle3):
        name = name or "eagle3"
        eagle3_format.check_fit(model.config, decoder.config, name)
        is_fused = can_fuse(device, model.config.layers.head_dim, dtype)
        make = GpuEagle3Drafter if is_fused else Eagle3Drafter
        return make(_prepare(model, device, dtype), name=name, **options)
    name = name or "dflash"
    dflash_format.check_fit(model.config, decoder.config, name)
    if model.config.block_size < 2:
        raise InputError(f"drafter {name}: block_size {model.config.block_size} drafts nothing")
    head = _draft_head(model, decoder, backend)
    is_fused = can_fuse(device, model.config.layers.head_dim, dtype)
    kind = GpuDFlashDrafter if is_fused else DFlashDrafter
    return kind(_prepare(model, device, dtype), head=head, name=name, **options)


def build_runner(
    decoder: Decoder, *, num_slots: int, context_length: int, device: torch.device, dtype: torch.dtype
) -> TargetRunner:
    """With recorded passes where the GPU can run them. On a GPU one of PyTorch's attention backends is switched off."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)  # it plans anew, for a tenth of a second, for every length it meets
    kind = GpuTargetRunner if can_fuse(device, decoder.config.head_dim, dtype) else TargetRunner
    return kind(decoder, num_slots=num_slots, context_length=context_length, device=device, dtype=dtype)


def load_draft_model(spec: str, decoder: Decoder, dtype: torch.dtype) -> DFlash | Eagle3:
    """The model in a folder or on the hub, by the architecture that its config names."""
    folder = resolve_folder(spec, what="drafter")
    path = folder / "config.json"
    names = read_config(path).get("architectures") or []
    if any(name in dflash_format.ARCHITECTURES for name in names):
        return dflash_format.load_dflash(str(folder), dtype)
    if any(name in eagle3_format.ARCHITECTURES for name in names):
        return eagle3_format.load_eagle3(str(folder), dtype, num_target_layers=decoder.config.num_layers)
    known = ", ".join(dflash_format.ARCHITECTURES + eagle3_format.ARCHITECTURES)
    raise InputError(f"{path}: architectures {names} name no drafter; known: {known}")


def _prepare(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    return model.to(device=device, dtype=dtype).eval().requires_grad_(False)


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
