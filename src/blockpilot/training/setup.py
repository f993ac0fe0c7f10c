"""One training run, from the folder of texts to the drafter on disk."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models.dflash import DFlash
from blockpilot.models.dflash_format import check_fit, load_dflash, save_dflash
from blockpilot.models.eagle3 import Eagle3
from blockpilot.models.eagle3_format import save_eagle3
from blockpilot.models.loading import LoadedTarget, load_target
from blockpilot.models.wheel_download import Progress
from blockpilot.training.dflash_objective import DFlashObjectiveConfig
from blockpilot.training.dflash_training import DFlashShape, DFlashTraining, build_dflash, check_data, frequent_tokens
from blockpilot.training.distributed import join_group
from blockpilot.training.eagle3_training import Eagle3Shape, Eagle3Training, build_eagle3
from blockpilot.training.responses import ResponseFolder, ResponseSet
from blockpilot.training.trainer import LoopConfig, Trainer

HELD_OUT_SHARE = 0.01
MAX_HELD_OUT = 256


@dataclass(frozen=True, kw_only=True)
class DrafterRun:
    """Everything a user may choose about one run."""

    kind: str = "dflash"
    layers: int = 3
    taps: tuple[int, ...] | int = 5
    block_size: int = 16
    intermediate_size: int | None = None
    selector_rank: int = 32
    head_size: int = 0  # eagle3: rows of its own head, 0 means 4096
    unrolled: int = 7  # eagle3: steps of training-time test
    steps: int = 2000
    batch_size: int = 64
    width: int = 448
    blocks: int = 32
    min_block_size: int = 16
    learning_rate: float = 1.5e-3
    optimizer: str = "adamw"
    position_weights: str = "exponential"
    gamma: float = 7.0
    labels: str = "data"
    seed: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 500
    limit_texts: int = 0
    start_from: str | None = None  # a drafter of the same shape whose weights training starts with
    is_compiled: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.block_size <= MAX_BLOCK_SIZE:
            raise InputError(f"block size must lie between 2 and {MAX_BLOCK_SIZE}, got {self.block_size}")
        if not 2 <= self.min_block_size <= self.block_size:
            raise InputError(f"min block size must lie between 2 and {self.block_size}, got {self.min_block_size}")


def load_training_target(
    spec: str, *, device: str, dtype: str | None, progress: Progress | None = None
) -> LoadedTarget:
    """The target, frozen, on its device; nothing is packed, because training reads its weights."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but PyTorch sees no GPU here: use --device cpu")
    name = dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    if name not in ("float32", "bfloat16", "float16"):
        raise InputError(f"unknown dtype {name!r}: use float32, bfloat16 or float16")
    target = load_target(spec, getattr(torch, name), progress)
    target.decoder.to(device).eval().requires_grad_(False)
    return target


def train_drafter(
    run: DrafterRun, target: LoadedTarget, *, data: Path, out: Path, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    device = target.decoder.embed_tokens.weight.device
    if run.optimizer == "muon" and device.type != "cuda":
        raise InputError("the muon optimizer needs a GPU (its iterations run in bfloat16): use --optimizer adamw")
    group = join_group(device.type)
    texts = ResponseFolder(data).read()
    manifest = ResponseFolder(data).read_manifest() or {}
    training_texts, held_out = split_texts(texts, run.limit_texts)
    agreement = check_data(target.decoder, training_texts, device=device, width=run.width)
    torch.manual_seed(run.seed)
    objective = _build_objective(run, target, training_texts, held_out)
    model = objective.model
    identity = {
        "run": asdict(run),
        "target": target.name,
        "data": manifest.get("config"),
        "num_texts": len(training_texts),
    }
    trainer = Trainer(
        objective, training_texts, loop_config(run), out=out, device=device, group=group, identity=identity
    )
    try:
        trainer.run(report)
    except torch.OutOfMemoryError as error:
        raise BlockPilotError(
            "out of GPU memory: lower --batch-size, --blocks or --head-size and start again"
        ) from error
    folder = out / "drafter"
    if group.rank == 0:
        model.to(torch.bfloat16)
        save_eagle3(model, folder) if isinstance(model, Eagle3) else save_dflash(model, folder)
    return {
        "drafter": str(folder),
        "steps": run.steps,
        "agreement": round(agreement, 4),
        "num_parameters": count(model),
    }


def _build_objective(
    run: DrafterRun, target: LoadedTarget, texts: ResponseSet, held_out: ResponseSet
) -> DFlashTraining | Eagle3Training:
    device = target.decoder.embed_tokens.weight.device
    shared = {"is_compiled": run.is_compiled, "held_out": held_out, "width": run.width}
    if run.kind == "eagle3":
        config = target.decoder.config
        rows = _frequent(run.head_size or 4096, target, texts)
        shape = Eagle3Shape(intermediate_size=run.intermediate_size, num_unrolled=run.unrolled)
        head = build_eagle3(shape, config, rows).to(device)
        return Eagle3Training(head, target.decoder, num_unrolled=run.unrolled, **shared)
    return DFlashTraining(
        _build_dflash(run, target, texts).to(device),
        target.decoder,
        DFlashObjectiveConfig(position_weights=run.position_weights, gamma=run.gamma, labels=run.labels),
        num_blocks=run.blocks,
        min_block_size=run.min_block_size,
        **shared,
    )


def _frequent(count: int, target: LoadedTarget, texts: ResponseSet) -> Tensor:
    config = target.decoder.config
    always = tuple(target.tokenizer.eos_token_ids or config.eos_token_ids)
    return frequent_tokens(texts, vocab_size=config.vocab_size, count=min(count, config.vocab_size), always=always)


def count(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def split_texts(texts: ResponseSet, limit: int) -> tuple[ResponseSet, ResponseSet]:
    """Training texts and held-out ones: the last hundredth, which is random because prompts were shuffled."""
    num_held_out = max(1, min(MAX_HELD_OUT, int(len(texts) * HELD_OUT_SHARE)))
    num_training = len(texts) - num_held_out
    if num_training < 1:
        raise InputError(f"{len(texts)} texts are too few to train on: synthesize more")
    kept = min(limit, num_training) if limit else num_training
    order = torch.arange(len(texts))
    return texts.subset(order[:kept]), texts.subset(order[num_training:])


def loop_config(run: DrafterRun) -> LoopConfig:
    return LoopConfig(
        num_steps=run.steps,
        batch_size=run.batch_size,
        width=run.width,
        learning_rate=run.learning_rate,
        optimizer=run.optimizer,
        seed=run.seed,
        evaluate_every=run.evaluate_every,
        checkpoint_every=run.checkpoint_every,
    )


def _build_dflash(run: DrafterRun, target: LoadedTarget, texts: ResponseSet) -> DFlash:
    config = target.decoder.config
    shape = DFlashShape(
        num_layers=run.layers,
        num_taps=run.taps if isinstance(run.taps, int) else len(run.taps),
        tap_layers=() if isinstance(run.taps, int) else tuple(run.taps),
        block_size=run.block_size,
        intermediate_size=run.intermediate_size,
        is_second=run.kind == "dflash2",
        selector_rank=run.selector_rank,
    )
    beyond = [layer for layer in shape.tap_layers if layer >= config.num_layers]
    if beyond:
        raise InputError(f"--taps {beyond}: the target has {config.num_layers} layers, numbered from 0")
    if run.start_from:
        return _start_from(run, shape, target)
    model = build_dflash(shape, config, mask_token_id=choose_mask_token(target, texts))
    if run.head_size and run.head_size < config.vocab_size:
        model.draft_token_ids = _frequent(run.head_size, target, texts)
    return model


def _start_from(run: DrafterRun, shape: DFlashShape, target: LoadedTarget) -> DFlash:
    """An earlier drafter, in full precision and trainable again."""
    assert run.start_from is not None
    model = load_dflash(run.start_from, torch.float32)
    wanted = build_dflash(shape, target.decoder.config, mask_token_id=model.config.mask_token_id).config
    for field in ("layers", "block_size", "tap_layers", "conv_kernel_size", "selector_rank"):
        if getattr(model.config, field) != getattr(wanted, field) and field != "layers":
            raise InputError(
                f"{run.start_from} has another shape: {field} is {getattr(model.config, field)!r} there, "
                f"{getattr(wanted, field)!r} here"
            )
    check_fit(model.config, target.decoder.config, run.start_from)
    return model.train().requires_grad_(True)


def choose_mask_token(target: LoadedTarget, texts: ResponseSet) -> int:
    """A token that no text uses: a special one if there is one, else the last of the vocabulary."""
    counts = torch.bincount(texts.token_ids, minlength=target.decoder.config.vocab_size)
    ends = set(target.tokenizer.eos_token_ids)
    unused = [
        index for index in sorted(target.tokenizer.special_ids, reverse=True) if not counts[index] and index not in ends
    ]
    return unused[0] if unused else int((counts == 0).nonzero()[-1]) if bool((counts == 0).any()) else len(counts) - 1
