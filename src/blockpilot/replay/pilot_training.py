"""From traces to pilots."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.core.errors import InputError
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fitting import Drafts, fit_calibration, fit_forecast
from blockpilot.pilots.prefill import PrefillConfig, PrefillPilot, PrefillTraining, read_values, train_prefill
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.simulate import total, walk_chain
from blockpilot.replay.trace_files import TraceSet, require_alike
from blockpilot.replay.traces import Trace

_MIN_TRACES = 8
_SAME = ("target", "drafter", "drafter_sha256", "dtype", "draft_sizes", "num_candidates", "vocab_size")


@dataclass(frozen=True)
class TraceGroup:
    """Traces of one pair, from one or more folders collected alike."""

    traces: list[Trace]
    manifest: dict[str, Any]  # of the first folder

    @property
    def num_anchors(self) -> int:
        return sum(trace.num_anchors for trace in self.traces)


def read_group(folders: Sequence[Path], *, like: TraceGroup | None = None) -> TraceGroup:
    """All traces of the folders; what they must share is compared with the first one, or with `like`."""
    sets = [TraceSet(folder) for folder in folders]
    require_alike(sets, _SAME, like.manifest if like else None)
    traces = [trace for found in sets for trace in found]
    others = like.traces if like else []
    if len({_widths(trace) for trace in (*traces, *others)}) > 1:
        raise InputError(f"the traces of {', '.join(map(str, folders))} were not collected alike: their widths differ")
    return TraceGroup(traces, sets[0].manifest)


def _widths(trace: Trace) -> tuple[int, ...]:
    """What arrays of several traces must share: the hidden size, logits or none, and how many candidates were kept."""
    num_candidates = (draft.log_probs.shape[-1] for draft in trace.drafts.values())
    return len(trace.prefill.hidden), trace.prefill.logits is not None, *num_candidates


def hold_out(group: TraceGroup, *, share: int = 4) -> tuple[TraceGroup, TraceGroup]:
    """Training traces, and every fourth by its prompt's id."""
    kept: list[Trace] = []
    held: list[Trace] = []
    for trace in group.traces:
        place = int(hashlib.sha256(trace.prompt_id.encode()).hexdigest(), 16) // 4 % share
        (kept if place else held).append(trace)
    return TraceGroup(kept, group.manifest), TraceGroup(held, group.manifest)


def check_enough(group: TraceGroup, what: str) -> None:
    if len(group.traces) < _MIN_TRACES:
        raise InputError(f"{len(group.traces)} {what} traces are too few, at least {_MIN_TRACES}: collect more prompts")
    if not group.num_anchors:
        raise InputError(f"the {what} traces hold answers of one token: collect with more --max-new-tokens")


def _are_enough(traces: Sequence[Trace]) -> bool:
    return len(traces) >= _MIN_TRACES and any(trace.num_anchors for trace in traces)


def drafts_of(traces: Sequence[Trace], size: int) -> Drafts:
    """What the drafter offered at one draft size, over all traces."""
    columns = [trace.draft(size) for trace in traces]
    starts = np.concatenate(([0], np.cumsum([len(column.true_ranks) for column in columns])))[:-1].tolist()
    names = ["log_probs", "true_ranks"]
    if all(column.is_paired for column in columns):
        names += ["first", "pairwise"]
    return Drafts(
        **{name: np.concatenate([getattr(column, name) for column in columns]) for name in names}, starts=starts
    )


def train_step(group: TraceGroup) -> tuple[StepPilot, StepPilot]:
    """The adaptive tree and the adaptive chain; they share their calibration.

    Traces of sampled answers get a calibration and forecasts of their own.
    """
    check_enough(group, "training")
    sampled = [trace for trace in group.traces if trace.temperature > 0]
    greedy = [trace for trace in group.traces if trace.temperature == 0]
    if not _are_enough(greedy):
        greedy, sampled = group.traces, []
    sizes = tuple(group.manifest["draft_sizes"])
    if not sizes:
        raise InputError("these traces hold no candidates: collect with --draft-sizes and every anchor")
    drafts = {size: drafts_of(greedy, size) for size in sizes}
    calibration = fit_calibration(list(drafts.values()))
    noisy_drafts = {size: drafts_of(sampled, size) for size in sizes} if _are_enough(sampled) else None
    noisy = fit_calibration(list(noisy_drafts.values())) if noisy_drafts else None
    tree, chain = (
        StepPilot(
            calibration,
            StepCosts.linear(),
            is_chain=is_chain,
            draft_sizes=sizes,
            forecast=fit_forecast(drafts, calibration, is_chain=is_chain),
            sampled=noisy,
            sampled_forecast=fit_forecast(noisy_drafts, noisy, is_chain=is_chain) if noisy_drafts and noisy else None,
        )
        for is_chain in (False, True)
    )
    return tree, chain


def tau_table(traces: Iterable[Trace], sizes: Sequence[int]) -> np.ndarray:
    """Tau [N, sizes] of every request at every fixed size."""
    return np.array([[total([walk_chain(trace, size)]).tau for size in sizes] for trace in traces], dtype=np.float32)


def train_prefill_pilot(
    group: TraceGroup,
    config: PrefillConfig,
    training: PrefillTraining,
    *,
    device: str = "cpu",
    report: Callable[[int, int], None] | None = None,
) -> PrefillPilot:
    """The BlockPilot paper's pilot, or a variant of it; `report` is called after every epoch."""
    import torch

    check_enough(group, "training")
    values = torch.stack([read_values(trace.prefill_state(), config.inputs) for trace in group.traces])
    tau = torch.from_numpy(tau_table(group.traces, config.sizes))
    return PrefillPilot(train_prefill(config, values.to(device), tau, training, report))
