"""Untrained drafters: shapes from the run and its target, weights to start from."""

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.models.config import DecoderConfig
from blockpilot.models.dflash import DFlash, DFlashConfig, DraftLayer
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.models.loading import LoadedTarget, check_fit, load_drafter
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.responses import ResponseSet

_EAGLE3_HEAD_SIZE = 4096
_SHAPE_FIELDS = ("block_size", "tap_layers", "conv_kernel_size", "selector_rank")
_LAYER_FIELDS = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope")


def build_dflash(run: DrafterRun, target: LoadedTarget, texts: ResponseSet) -> DFlash:
    """A DFlash drafter, fresh or with the weights of `run.start_from`."""
    config = target.decoder.config
    wanted = dflash_config(run, config, mask_token_id=choose_mask_token(target, texts))
    if run.start_from:
        return _start_from(run, wanted, config)
    model = DFlash(wanted)
    initialise(model)
    if 0 < run.head_size < config.vocab_size:
        model.draft_token_ids = frequent_tokens(run.head_size, target, texts)
    return model


def dflash_config(run: DrafterRun, target: DecoderConfig, *, mask_token_id: int) -> DFlashConfig:
    taps = spread_taps(target.num_layers, run.taps) if isinstance(run.taps, int) else run.taps
    beyond = [layer for layer in taps if not 0 <= layer < target.num_layers]
    if beyond:
        raise InputError(f"--taps {beyond}: the target has {target.num_layers} layers, numbered from 0")
    is_second = run.kind == "dflash2"
    size = run.intermediate_size or target.intermediate_size
    return DFlashConfig(
        layers=replace(target, architecture="qwen3", moe=None, num_layers=run.layers, intermediate_size=size),
        block_size=run.block_size,
        mask_token_id=mask_token_id,
        tap_layers=taps,
        num_target_layers=target.num_layers,
        conv_kernel_size=2 if is_second else 0,
        selector_rank=run.selector_rank if is_second else 0,
    )


def spread_taps(num_target_layers: int, count: int) -> tuple[int, ...]:
    """`count` layers spread evenly over 1 .. N-3, as the published drafters have them; over all where N is small."""
    if count < 1:
        raise InputError(f"--taps must be at least 1, got {count}")
    if count == 1:
        return (num_target_layers // 2,)
    count = min(count, num_target_layers)
    first, last = (1, num_target_layers - 3) if num_target_layers - 3 >= count else (0, num_target_layers - 1)
    return tuple(round(first + (last - first) * i / max(1, count - 1)) for i in range(count))


def initialise(model: DFlash) -> None:
    """Small random matrices, smaller still where they write into the residual stream; convolutions stay identities."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and "conv" not in name and "codebook" not in name:
            torch.nn.init.normal_(parameter, std=0.02)
    for layer in model.layers:
        draft = cast(DraftLayer, layer)
        for last in (draft.self_attn.o_proj.weight, draft.mlp.down_proj.weight):
            last.data.mul_((2 * len(model.layers)) ** -0.5)


def _start_from(run: DrafterRun, wanted: DFlashConfig, target: DecoderConfig) -> DFlash:
    """An earlier drafter, in full precision and trainable again; its mask token and head rows stay."""
    assert run.start_from is not None
    model = load_drafter(run.start_from, torch.float32)
    if not isinstance(model, DFlash):
        raise InputError(f"--start-from takes DFlash drafters only, and {run.start_from} is none")
    check_fit(model.config, target, run.start_from)
    num_rows = target.vocab_size if model.draft_token_ids is None else len(model.draft_token_ids)
    pairs = {name: (getattr(model.config, name), getattr(wanted, name)) for name in _SHAPE_FIELDS}
    pairs |= {name: (getattr(model.config.layers, name), getattr(wanted.layers, name)) for name in _LAYER_FIELDS}
    pairs["head_size"] = (num_rows, run.head_size or target.vocab_size)
    for name, (there, here) in pairs.items():
        if there != here:
            raise InputError(f"{run.start_from} has another shape: {name} is {there!r} there, {here!r} here")
    return model.train().requires_grad_(True)


def build_eagle3(run: DrafterRun, target: LoadedTarget, texts: ResponseSet) -> Eagle3:
    """A fresh EAGLE-3 head: one layer, three taps, a head over the tokens that answers use most."""
    config = target.decoder.config
    count, size = config.num_layers, run.intermediate_size or config.intermediate_size
    rows = frequent_tokens(min(run.head_size or _EAGLE3_HEAD_SIZE, config.vocab_size), target, texts)
    model = Eagle3(
        Eagle3Config(
            layers=replace(config, architecture="llama", moe=None, num_layers=1, intermediate_size=size),
            draft_vocab_size=len(rows),
            tap_layers=(1, count // 2 - 1, count - 4) if count >= 6 else (0, count // 2, count - 1),
            num_target_layers=count,
            target_hidden_size=config.hidden_size,
        )
    )
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.02)
    model.draft_token_ids = rows
    return model


def frequent_tokens(count: int, target: LoadedTarget, texts: ResponseSet) -> Tensor:
    """The `count` token ids that answers use most, ascending; the ends of an answer are among them."""
    config = target.decoder.config
    counts = texts.count_answer_tokens(config.vocab_size).float()
    counts[list(target.eos_token_ids)] = float("inf")
    return counts.topk(count).indices.sort().values


def choose_mask_token(target: LoadedTarget, texts: ResponseSet) -> int:
    """A token that no text uses: a special one if there is one, else the last of the vocabulary."""
    counts = torch.bincount(texts.token_ids, minlength=target.decoder.config.vocab_size)
    unused = set((counts == 0).nonzero().flatten().tolist()) - set(target.tokenizer.eos_token_ids)
    return max(unused & target.tokenizer.special_ids, default=max(unused, default=len(counts) - 1))
