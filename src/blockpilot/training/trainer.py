"""The training loop: the same for every drafter, exact to resume.

The texts and the random numbers of step s are a function of (seed, s) alone, so a run that stops and starts again sees
the same data in the same order. A checkpoint holds weights, optimiser and step; on a CPU the resumed run is
bit-identical. With several processes (torchrun) each takes its own share of every batch; sums and weights of the loss
are kept apart until all shares are counted, so the step is that of a single process with the whole batch.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from blockpilot.core.device import is_out_of_memory
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import ensure_folder
from blockpilot.training.batching import Batches
from blockpilot.training.checkpoints import (
    CHECKPOINT,
    StopFlag,
    TrainingStoppedError,
    append_log,
    load_checkpoint,
    read_log,
    restore,
    save_checkpoint,
    stop_flag,
    trim_log,
)
from blockpilot.training.distributed import Group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.objectives import DrafterTraining
from blockpilot.training.responses import ResponseSet

_WARMUP_SHARE = 0.03  # of the steps
_WEIGHT_DECAY = 0.01
_CLIP_NORM = 1.0
_ASK_GROUP_EVERY = 8  # steps between two questions to all processes whether to stop

Report = Callable[[dict[str, Any]], None]


class Trainer:
    log_every = 25  # steps

    def __init__(
        self,
        objective: DrafterTraining,
        data: ResponseSet,
        run: DrafterRun,
        *,
        out: Path,
        group: Group,
        identity: dict[str, Any],
    ) -> None:
        """Resumes from the checkpoint in `out`, if there is one; it must be of the same run and `identity`."""
        if run.batch_size % group.size:
            raise InputError(f"--batch-size {run.batch_size} must be a multiple of the {group.size} processes")
        self.objective, self.settings = objective, run
        self.batches = Batches(data, run, group)
        self.group, self.out = group, ensure_folder(out)
        self.identity = json.loads(json.dumps({"run": asdict(run)} | identity))
        self.parameters = [parameter for parameter in objective.model.parameters() if parameter.requires_grad]
        self.optimizers = _make_optimizers(objective.model, run)
        self.step, self.saved_step = 0, -1
        self._is_whole = True  # weights and optimisers belong to `step`, not to the middle of an update
        self._load_checkpoint()

    def run(self, report: Report) -> None:
        """Train up to the last step, logging, evaluating and saving on the way; an interruption saves first."""
        with stop_flag() as stop:
            try:
                self._run(report, stop)
            except KeyboardInterrupt:
                raise TrainingStoppedError(self._save_and_tell("interrupted")) from None
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                advice = "out of memory: lower --batch-size or --blocks (both may change within a run)"
                raise BlockPilotError(self._save_and_tell(advice)) from error

    def _run(self, report: Report, stop: StopFlag) -> None:
        started, first = time.perf_counter(), self.step
        has_evaluation = any(row["step"] == self.step and "evaluation" in row for row in read_log(self.out))
        if self._is_evaluation_due() and not has_evaluation:
            self._evaluate(report)  # the run ended between this step's checkpoint and its evaluation
        while self.step < self.settings.steps:
            metrics = self._train_step()
            is_last = self.step == self.settings.steps
            if self.step % self.log_every == 0 or is_last:
                self._require_finite([metrics["loss"], metrics["gradient_norm"]])
                speed = (self.step - first) / (time.perf_counter() - started)
                self._log_metrics(metrics, speed, report)
            is_stopping = self._is_stopping(stop) and not is_last
            if is_last or is_stopping or self.step % self.settings.checkpoint_every == 0:
                self._save_checkpoint()
            if self._is_evaluation_due():
                self._evaluate(report)
            if is_stopping:
                raise TrainingStoppedError(self._save_and_tell("stopped"), stop.received or 15)

    def _train_step(self) -> dict[str, Tensor]:
        rate = self.settings.learning_rate * _learning_rate_scale(self.step, self.settings.steps)
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = rate
        texts, uniform = self.batches.at(self.step, self.objective.num_random)
        device = self.objective.device
        terms = self.objective.loss(texts.to(device), uniform.to(device))
        loss = (terms.sums / self.group.mean(terms.weights).clamp(min=1e-6)).sum()
        loss.backward()
        self.group.average_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, _CLIP_NORM)
        self._update()
        rates = {"gradient_norm": norm, "learning_rate": torch.tensor(rate, device=device)}
        return {"loss": loss.detach(), **terms.metrics, **rates}

    def _update(self) -> None:
        self._is_whole = False
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._is_whole = True

    def _is_stopping(self, stop: StopFlag) -> bool:
        """All processes stop at the same step, or the others would wait for ever."""
        if self.group.size > 1 and self.step % _ASK_GROUP_EVERY:
            return False
        return self.group.any(stop.received > 0, self.objective.device)

    def _is_evaluation_due(self) -> bool:
        every = self.settings.evaluate_every
        return self.step == self.settings.steps or bool(every and self.step and self.step % every == 0)

    def _evaluate(self, report: Report) -> None:
        if self.group.rank == 0:
            self._log({"evaluation": self.objective.evaluate()}, report)

    def _log_metrics(self, metrics: dict[str, Tensor], speed: float, report: Report) -> None:
        values = self.group.mean(torch.stack([value.float() for value in metrics.values()])).tolist()
        self._log({**dict(zip(metrics, values, strict=True)), "steps_per_second": speed}, report)

    def _log(self, values: dict[str, Any], report: Report) -> None:
        if self.group.rank == 0:
            row = {"step": self.step, **values}
            append_log(self.out, row)
            report(row)

    def _save_and_tell(self, what: str) -> str:
        """Keep all that can be kept, and say how to go on."""
        if self._is_whole and self.step > max(0, self.saved_step):
            self._save_checkpoint()
        if self.saved_step < 0:
            return f"{what}; nothing was saved yet: give the same command again"
        return f"{what}; step {self.saved_step} is saved in {self.out}: give the same command again to go on from there"

    def _require_finite(self, values: Sequence[Tensor]) -> None:
        """Stop where training has diverged. What was saved before stays, and is never replaced by what is broken."""
        if bool(torch.stack([value.detach().isfinite().all() for value in values]).all()):
            return
        self._is_whole = False
        saved = f"step {self.saved_step} is saved in {self.out}" if self.saved_step >= 0 else "nothing was saved"
        raise BlockPilotError(
            f"training has diverged by step {self.step}: loss or weights are no longer finite numbers; {saved}. Train "
            "anew with a lower --learning-rate into another --out"
        )

    def _save_checkpoint(self) -> None:
        self._require_finite(self.parameters)
        if self.group.rank == 0:
            state = {
                "identity": self.identity,
                "step": self.step,
                "model": self.objective.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            }
            save_checkpoint(self.out, state)
        self.saved_step = self.step

    def _load_checkpoint(self) -> None:
        state = load_checkpoint(self.out, self.identity, self.objective.device)
        if state is not None:
            try:
                restore(self.objective.model, self.optimizers, state)
            except ValueError as error:
                path = self.out / CHECKPOINT
                raise InputError(f"{path} does not fit this drafter ({error}): delete it to start anew") from error
            self.step = self.saved_step = state["step"]
        if self.group.rank == 0:
            trim_log(self.out, self.step if state else -1)


def _make_optimizers(model: nn.Module, run: DrafterRun) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for matrices; look-up tables are no matrices."""
    options: dict[str, Any] = {"lr": run.learning_rate, "weight_decay": _WEIGHT_DECAY}
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    matrices = {name for name, p in named if run.optimizer == "muon" and p.dim() == 2 and "codebook" not in name}
    rest = [parameter for name, parameter in named if name not in matrices]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(rest, betas=(0.9, 0.95), **options)]
    if matrices:
        chosen = [parameter for name, parameter in named if name in matrices]
        optimizers.append(torch.optim.Muon(chosen, adjust_lr_fn="match_rms_adamw", **options))
    return optimizers


def _learning_rate_scale(step: int, num_steps: int) -> float:
    """What the learning rate of `step` is multiplied by: linear warm-up, then a cosine down to a fiftieth."""
    warmup = max(1, int(_WARMUP_SHARE * num_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
