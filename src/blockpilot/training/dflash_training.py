"""Setting up DFlash training: shapes from the target, the head's rows, sanity of the data, and the objective."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.training.blocks import Blocks, sample_blocks
from blockpilot.training.dflash_objective import DFlashObjectiveConfig, dflash_loss, read_taps
from blockpilot.training.evaluation import evaluate_dflash, head_rows
from blockpilot.training.responses import ResponseSet


@dataclass(frozen=True, kw_only=True)
class DFlashShape:
    """What the user may choose about the drafter; the rest follows from the target."""

    num_layers: int = 3
    num_taps: int = 5
    tap_layers: tuple[int, ...] = ()  # empty: spread evenly
    block_size: int = 16
    intermediate_size: int | None = None
    is_second: bool = False
    selector_rank: int = 0
    head_size: int = 0  # 0: the whole head
    mask_token_id: int | None = None


def spread_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly over 1 .. N-3, as the published drafters have them."""
    if count == 1:
        return (num_target_layers // 2,)
    first, last = 1, max(1, num_target_layers - 3)
    return tuple(round(first + (last - first) * i / (count - 1)) for i in range(count))


def build_dflash(shape: DFlashShape, target: DecoderConfig, *, mask_token_id: int) -> DFlash:
    layers = replace(
        target,
        architecture="qwen3",
        moe=None,
        num_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size or target.intermediate_size,
    )
    config = DFlashConfig(
        layers=layers,
        block_size=shape.block_size,
        mask_token_id=mask_token_id if shape.mask_token_id is None else shape.mask_token_id,
        tap_layers=shape.tap_layers or spread_taps(target.num_layers, shape.num_taps),
        num_target_layers=target.num_layers,
        conv_kernel_size=2 if shape.is_second else 0,
        selector_rank=shape.selector_rank if shape.is_second else 0,
    )
    model = DFlash(config)
    _initialise(model)
    return model


def _initialise(model: DFlash) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "conv" not in name and "codebook" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    for layer in model.layers:
        for last in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            last.data.mul_((2 * len(model.layers)) ** -0.5)


def frequent_tokens(data: ResponseSet, *, vocab_size: int, count: int, always: tuple[int, ...]) -> Tensor:
    """The `count` token ids that answers use most, ascending; `always` are in it whatever their count."""
    counts = torch.bincount(data.token_ids, minlength=vocab_size).float()
    counts[list(always)] = float("inf")
    return counts.topk(count).indices.sort().values


def check_data(decoder: Decoder, data: ResponseSet, *, device: torch.device, width: int, least: float = 0.4) -> float:
    """Share of answer tokens that the target itself would say. Far below what it wrote: the data is another model's."""
    count = min(32, len(data))
    ids, lengths, prompt_lengths = (x.to(device) for x in data.batch(torch.arange(count), width))
    hidden, _ = read_taps(decoder, ids, (0,))
    choices = decoder.logits(hidden).argmax(-1).view(ids.shape)
    places = torch.arange(ids.shape[1], device=device)
    is_answer = (places >= prompt_lengths[:, None]) & (places < lengths[:, None])
    share = float((choices[:, :-1] == ids[:, 1:])[is_answer[:, 1:]].float().mean())
    if not share >= least:
        raise InputError(
            f"the target agrees with only {share:.0%} of the training answers: they were written by another model or "
            "under another chat template; run `blockpilot synthesize` with this target"
        )
    return share


class DFlashTraining:
    """The objective that the trainer runs."""

    def __init__(
        self,
        model: DFlash,
        decoder: Decoder,
        config: DFlashObjectiveConfig,
        *,
        num_blocks: int,
        min_block_size: int,
        is_compiled: bool,
        held_out: ResponseSet | None,
        width: int,
    ) -> None:
        self.model, self.decoder, self.config = model, decoder, config
        self.num_blocks, self.min_block_size, self.width = num_blocks, min_block_size, width
        self.held_out = held_out
        self.device = decoder.embed_tokens.weight.device
        self.head = head_rows(model, decoder).detach()
        self.row_of = _row_table(model, decoder.config.vocab_size, self.device)
        self._loss: Callable[..., tuple[Tensor, dict[str, Tensor]]] = (
            torch.compile(dflash_loss) if is_compiled else dflash_loss
        )
        self._read_taps = torch.compile(read_taps) if is_compiled else read_taps

    def loss(
        self, ids: Tensor, lengths: Tensor, prompt_lengths: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]:
        blocks = sample_blocks(
            ids,
            lengths,
            prompt_lengths,
            num_blocks=self.num_blocks,
            full_size=self.model.config.block_size,
            min_size=self.min_block_size,
            generator=generator,
        )
        hidden, taps = self._read_taps(self.decoder, ids, self.model.config.tap_layers)
        labels = self._labels(ids, hidden, blocks)
        with self._autocast():
            return self._loss(
                self.model,
                self.head,
                taps,
                ids,
                blocks,
                embed=self.decoder.embed_tokens,
                labels=labels,
                config=self.config,
            )

    def evaluate(self) -> dict[str, Any]:
        if self.held_out is None:
            return {}
        with self._autocast():
            report = evaluate_dflash(
                self.model, self.decoder, self.held_out, block_size=self.model.config.block_size, width=self.width
            )
        return asdict(report)

    def _labels(self, ids: Tensor, hidden: Tensor, blocks: Blocks) -> Tensor:
        labels = blocks.labels
        if self.config.labels == "argmax":
            with torch.no_grad():
                said = self.decoder.logits(hidden).argmax(-1).view(ids.shape)  # after position t comes said[t]
            steps = torch.arange(blocks.full_size - 1, device=ids.device)
            places = (blocks.anchors[..., None] + steps).clamp(max=ids.shape[1] - 1)
            labels = said[:, None].expand(-1, places.shape[1], -1).gather(2, places)
        return labels if self.row_of is None else self.row_of[labels]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()


def _row_table(model: DFlash, vocab_size: int, device: torch.device) -> Tensor | None:
    """Token id -> row of the reduced head, -1 where it has none."""
    if model.draft_token_ids is None:
        return None
    rows = torch.full((vocab_size,), -1, dtype=torch.int64)
    rows[model.draft_token_ids.cpu()] = torch.arange(len(model.draft_token_ids))
    model.draft_token_ids = model.draft_token_ids.to(device)
    return rows.to(device)
