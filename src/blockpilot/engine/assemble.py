"""From the text of `--drafter` to a drafter that fits its target."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from blockpilot.core.config import EngineConfig
from blockpilot.core.errors import InputError
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import Drafter
from blockpilot.decoding.ngram import NgramDrafter
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.models.dflash_format import check_fit, load_dflash
from blockpilot.models.packing import pack_linear


def build_drafter(
    spec: str | Drafter | DFlash | None,
    decoder: Decoder,
    *,
    config: EngineConfig,
    context_length: int,
    device: torch.device,
    dtype: torch.dtype,
    backend: str,
) -> Drafter | None:
    """`ngram`, a folder or hub id with a DFlash checkpoint, a loaded model, or a ready drafter. None: no drafter."""
    if spec is None or spec == "none":
        return None
    if spec == "ngram":
        return NgramDrafter()
    if isinstance(spec, str):
        model, name = load_dflash(spec, dtype), Path(spec).name
    elif isinstance(spec, DFlash):
        model, name = spec, "dflash"
    else:
        return spec
    check_fit(model.config, decoder.config, name)
    if model.config.block_size < 2:
        raise InputError(f"drafter {name}: block_size {model.config.block_size} drafts nothing")
    return DFlashDrafter(
        model.to(device=device, dtype=dtype).eval().requires_grad_(False),
        embed=decoder.embed_tokens,
        head=_draft_head(model, decoder, backend),
        num_slots=config.num_slots,
        context_length=context_length,
        device=device,
        dtype=dtype,
        linear_backend=backend,
        name=name,
    )


def _draft_head(model: DFlash, decoder: Decoder, backend: str) -> Callable[[Tensor], Tensor]:
    """The target's head, or the rows of it that the drafter looks at. Call before the target's weights are packed."""
    if model.draft_token_ids is None:
        return lambda hidden: decoder.lm_head(hidden)  # looked up late: packing replaces the layer
    rows = decoder.lm_head.weight[model.draft_token_ids.to(decoder.lm_head.weight.device)]
    head = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    head.weight = nn.Parameter(rows, requires_grad=False)
    return pack_linear(head, backend)
