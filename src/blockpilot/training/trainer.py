"""The training loop: the same for every drafter, exact to resume.

The batch and the anchors of step s are a function of (seed, s) alone, so a run that stops and starts again sees the
same data in the same order. A checkpoint holds weights, optimiser and step; on a CPU the resumed run is bit-identical.
With several processes (torchrun) each takes its own share of every batch and gradients are averaged.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, ensure_folder
from blockpilot.training.distributed import Group
from blockpilot.training.responses import ResponseSet

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    num_steps: int
    batch_size: int = 64
    width: int = 448
    learning_rate: float = 1.5e-3
    warmup_share: float = 0.03
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    optimizer: str = "adamw"  # or muon, for matrices
    seed: int = 0
    log_every: int = 25
    evaluate_every: int = 0  # 0: only at the end
    checkpoint_every: int = 500


class Objective(Protocol):
    """What is trained, and how a batch turns into a loss."""

    model: nn.Module

    def loss(
        self, ids: Tensor, lengths: Tensor, prompt_lengths: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, dict[str, Tensor]]: ...

    def evaluate(self) -> dict[str, Any]: ...


class Trainer:
    def __init__(
        self,
        objective: Objective,
        data: ResponseSet,
        config: LoopConfig,
        *,
        out: Path,
        device: torch.device,
        group: Group,
        identity: dict[str, Any],
    ) -> None:
        self.objective, self.data, self.config = objective, data, config
        self.device, self.group, self.out = device, group, ensure_folder(out)
        self.identity = json.loads(json.dumps(identity | {"loop": asdict(config)}))
        self.parameters = [parameter for parameter in objective.model.parameters() if parameter.requires_grad]
        self.optimizers = make_optimizers(objective.model, config)
        self.step = 0
        self._load_checkpoint()

    def run(self, report: Callable[[dict[str, Any]], None]) -> None:
        """Train up to `num_steps`, logging, evaluating and saving on the way."""
        started, first = time.perf_counter(), self.step
        while self.step < self.config.num_steps:
            metrics = self._train_step()
            self.step += 1
            is_last = self.step == self.config.num_steps
            if self.step % self.config.log_every == 0 or is_last:
                row = {"step": self.step, **{name: float(value) for name, value in metrics.items()}}
                row["steps_per_second"] = (self.step - first) / (time.perf_counter() - started)
                self._log(row, report)
            if is_last or (self.config.evaluate_every and self.step % self.config.evaluate_every == 0):
                self._log({"step": self.step, "evaluation": self.objective.evaluate()}, report)
            if is_last or self.step % self.config.checkpoint_every == 0:
                self._save_checkpoint()

    def _train_step(self) -> dict[str, Tensor]:
        rate = self._set_learning_rate()
        generator = torch.Generator(self.device).manual_seed(self._seed(self.step))
        ids, lengths, prompt_lengths = (
            x.to(self.device) for x in self.data.batch(self._indices(self.step), self.config.width)
        )
        loss, metrics = self.objective.loss(ids, lengths, prompt_lengths, generator)
        loss.backward()
        self.group.average_gradients(self.parameters)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return metrics | {"gradient_norm": norm, "learning_rate": torch.tensor(rate)}

    def _set_learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a fiftieth."""
        warmup = max(1, int(self.config.warmup_share * self.config.num_steps))
        progress = (self.step - warmup) / max(1, self.config.num_steps - warmup)
        scale = (self.step + 1) / warmup if self.step < warmup else 0.02 + 0.49 * (1 + math.cos(math.pi * progress))
        for optimizer in self.optimizers:
            for parameters in optimizer.param_groups:
                parameters["lr"] = scale * self.config.learning_rate
        return scale * self.config.learning_rate

    def _indices(self, step: int) -> Tensor:
        """This process's share of the texts of one step: epochs are shuffles that depend on the seed alone."""
        per_epoch = max(1, len(self.data) // self.config.batch_size)
        epoch, place = divmod(step, per_epoch)
        order = self._epoch_order(epoch)
        rows = order[place * self.config.batch_size : (place + 1) * self.config.batch_size]
        return rows[self.group.rank :: self.group.size]

    def _epoch_order(self, epoch: int) -> Tensor:
        if getattr(self, "_cached_epoch", None) != epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 7919 + epoch)
            self._cached_order, self._cached_epoch = torch.randperm(len(self.data), generator=generator), epoch
        return self._cached_order

    def _seed(self, step: int) -> int:
        return (self.config.seed * 1_000_003 + step) * 64 + self.group.rank

    def _log(self, row: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
        if self.group.rank == 0:
            with (self.out / LOG).open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            report(row)

    def _save_checkpoint(self) -> None:
        if self.group.rank:
            return
        state = {
            "identity": self.identity,
            "step": self.step,
            "model": self.objective.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
        }
        with atomic_path(self.out / CHECKPOINT) as path:
            torch.save(state, path)

    def _load_checkpoint(self) -> None:
        path = self.out / CHECKPOINT
        if not path.is_file():
            (self.out / LOG).unlink(missing_ok=True)
            return
        state = torch.load(path, map_location=self.device, weights_only=True)
        for key, value in self.identity.items():
            if state["identity"].get(key) != value:
                raise InputError(
                    f"{path} belongs to another run: {key} was {state['identity'].get(key)!r}, now {value!r}; "
                    "choose another --out"
                )
        self.objective.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        _trim_log(self.out / LOG, self.step)


def make_optimizers(model: nn.Module, config: LoopConfig) -> list[torch.optim.Optimizer]:
    named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    is_muon = {
        name: config.optimizer == "muon" and parameter.dim() == 2 and "codebook" not in name
        for name, parameter in named
    }
    rest = [parameter for name, parameter in named if not is_muon[name]]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=config.weight_decay)
    ]
    matrices = [parameter for name, parameter in named if is_muon[name]]
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                matrices, lr=config.learning_rate, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
            )
        )
    return optimizers


def _trim_log(path: Path, step: int) -> None:
    """Drop rows written after the checkpoint: those steps will run again."""
    if path.is_file():
        rows = [line for line in path.read_text(encoding="utf-8").splitlines() if json.loads(line)["step"] <= step]
        with atomic_path(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in rows), encoding="utf-8")


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    for line in (out / LOG).read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def _is_small(name: str) -> bool:
    """Convolution and selector parameters start at zero or are look-up tables: orthogonal updates do not suit them."""
    return "conv" in name or "candidate_selector" in name
