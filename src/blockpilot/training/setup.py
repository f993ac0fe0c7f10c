"""One training run, from the folder of texts to the drafter on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from blockpilot.core.config import default_dtype
from blockpilot.core.device import resolve_device
from blockpilot.core.errors import InputError
from blockpilot.core.files import remove_leftovers
from blockpilot.core.manifests import TEXTS, TRAINING, read_manifest, require_room
from blockpilot.core.progress import Report
from blockpilot.models.decoder import Decoder
from blockpilot.models.loading import LoadedTarget, load_target, save_drafter
from blockpilot.training.checkpoints import read_log
from blockpilot.training.distributed import join_group, own_device
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.drafters import build_dflash, build_eagle3
from blockpilot.training.figure import draw_curve
from blockpilot.training.objectives import DFlashTraining, DrafterTraining, Eagle3Training
from blockpilot.training.responses import ResponseSet, read_responses
from blockpilot.training.text_passes import read_taps
from blockpilot.training.trainer import Trainer

_HELD_OUT_SHARE = 0.01
_MAX_HELD_OUT = 256
_CHECKED_TEXTS = 32
_LEAST_AGREEMENT = 0.4  # of answers that are mostly greedy, far below what the author of the text reaches


def load_training_target(spec: str, *, device: str, dtype: str | None, progress: Report | None = None) -> LoadedTarget:
    """The target, frozen, on its device; nothing is packed, because training reads its weights."""
    resolve_device(device)
    place, name = own_device(device), dtype or default_dtype(device)
    if name not in ("float32", "bfloat16", "float16"):
        raise InputError(f"unknown dtype {name!r}: use float32, bfloat16 or float16")
    target = load_target(spec, getattr(torch, name), progress)
    target.decoder.to(place).eval().requires_grad_(False)
    return target


def train_drafter(
    run: DrafterRun, target: LoadedTarget, *, data: Path, out: Path, report: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Train, save the drafter into `out/drafter`, draw its curve, and return what a user wants to know at the end."""
    device = target.decoder.embed_tokens.weight.device
    if run.optimizer == "muon" and device.type != "cuda":
        raise InputError("the muon optimizer needs a GPU (its iterations run in bfloat16): use --optimizer adamw")
    require_room(out, TRAINING)
    responses = read_responses(data)
    responses.require_vocabulary(target.decoder.config.vocab_size)
    texts, held_out = split_texts(responses, run.limit_texts)
    agreement = check_data(target.decoder, texts, width=run.longest)
    torch.manual_seed(run.seed)
    objective: DrafterTraining
    if run.kind == "eagle3":
        objective = Eagle3Training(build_eagle3(run, target, texts).to(device), target.decoder, run, held_out)
    else:
        objective = DFlashTraining(build_dflash(run, target, texts).to(device), target.decoder, run, held_out)
    source = (read_manifest(data, TEXTS) or {}).get("config")
    identity = {"target": target.name, "data": source, "num_texts": len(texts)}
    with join_group(device) as group:
        Trainer(objective, texts, run, out=out, group=group, identity=identity).run(report)
    if group.rank == 0:
        remove_leftovers(out / "drafter")
        save_drafter(objective.model.to(torch.bfloat16), out / "drafter")
        draw_curve(out)
    return {
        "drafter": str(out / "drafter"),
        "steps": run.steps,
        "agreement": round(agreement, 4),
        "num_parameters": sum(parameter.numel() for parameter in objective.model.parameters()),
        "evaluation": next((row["evaluation"] for row in reversed(list(read_log(out))) if "evaluation" in row), {}),
    }


def check_data(decoder: Decoder, data: ResponseSet, *, width: int) -> float:
    """Share of answer tokens that the target itself would say; an error where it is too low to be its own text.

    Hours of training on another model's text would end in a drafter nobody accepts.
    """
    texts = data.batch(torch.arange(min(_CHECKED_TEXTS, len(data))), width).to(decoder.embed_tokens.weight.device)
    hidden, _ = read_taps(decoder, texts.ids, (0,))
    choices = decoder.logits(hidden).argmax(-1).view(texts.ids.shape)
    places = torch.arange(width, device=texts.ids.device)
    is_answer = (places >= texts.prompt_lengths[:, None]) & (places < texts.lengths[:, None])
    share = float((choices[:, :-1] == texts.ids[:, 1:])[is_answer[:, 1:]].float().mean())
    if not share >= _LEAST_AGREEMENT:  # also where there is no answer at all, and the share is no number
        raise InputError(
            f"the target agrees with only {share:.0%} of the training answers: they were written by another model or "
            "under another chat template; run `blockpilot synthesize` with this target"
        )
    return share


def split_texts(texts: ResponseSet, limit: int) -> tuple[ResponseSet, ResponseSet]:
    """Training texts and held-out ones: the last hundredth, which is random because prompts were shuffled."""
    num_held_out = max(1, min(_MAX_HELD_OUT, int(len(texts) * _HELD_OUT_SHARE)))
    num_training = len(texts) - num_held_out
    if num_training < 1:
        raise InputError(f"{len(texts)} texts are too few to train on: synthesize more")
    return texts.slice(0, min(limit or num_training, num_training)), texts.slice(num_training, len(texts))
