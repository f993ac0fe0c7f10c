"""The arithmetic of results: rates, intervals, and what the steps of answers add up to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from blockpilot.bench.answers import Answer
from blockpilot.text.repetition import count_repeats, loop_free_steps

_NUM_RESAMPLES = 2000
_SEED = 20261115  # of the bootstrap alone


@dataclass(frozen=True)
class Measured:
    """Tokens and seconds of units that are resampled together: prompts, or batches of them."""

    tokens: NDArray[np.float64]  # [n], emitted by steps
    decode: NDArray[np.float64]  # [n], seconds of the steps
    whole: NDArray[np.float64]  # [n], seconds with prefill
    all_tokens: NDArray[np.float64]  # [n], with the first token, which prefill yields

    @property
    def tokens_per_second(self) -> float | None:
        return divide(self.tokens.sum(), self.decode.sum())

    @property
    def end_to_end_rate(self) -> float | None:
        return divide(self.all_tokens.sum(), self.whole.sum())


def add_up(answers: Sequence[Answer]) -> Measured:
    """One method's answers to one task, per batch and in the order of batches.

    All requests of a batch start decoding in the same step, so the longest one has seen every step: its seconds are
    the batch's.
    """
    rows = []
    number = attrgetter("batch")
    for _, group in groupby(sorted(answers, key=number), key=number):
        batch = list(group)
        longest = longest_answers(batch)
        decode = sum(answer.decode_seconds for answer in longest)
        prefill = sum(answer.prefill_seconds for answer in longest)
        emitted = sum(sum(answer.emitted) for answer in batch)
        rows.append((emitted, decode, decode + prefill, sum(len(answer.token_ids) for answer in batch)))
    columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
    return Measured(*columns)


def longest_answers(answers: Iterable[Answer]) -> list[Answer]:
    """Of every pass through the engine (task, batch, repeat, turn) the answer that was decoded longest."""
    found: dict[tuple[str, int, int, int], Answer] = {}
    for answer in answers:
        key = (*answer.round_key, answer.turn)
        if key not in found or answer.decode_seconds > found[key].decode_seconds:
            found[key] = answer
    return list(found.values())


def speedup(ours: Measured, other: Measured) -> float | None:
    return divide(ours.tokens_per_second, other.tokens_per_second)


def speedup_interval(pairs: Sequence[tuple[Measured, Measured]]) -> list[float] | None:
    """95 % of the paired bootstrap of the speedup, averaged over tasks: one (ours, other) pair per task.

    Prompts are drawn within their task, the same ones for both sides. None with fewer than two prompts.
    """
    if not pairs or all(len(ours.tokens) < 2 for ours, _ in pairs):
        return None
    draw = np.random.default_rng(_SEED)
    total = np.zeros(_NUM_RESAMPLES)
    for ours, other in pairs:
        rows = draw.integers(len(ours.tokens), size=(_NUM_RESAMPLES, len(ours.tokens)))
        total += _rates(ours, rows) / _rates(other, rows)
    total = total[np.isfinite(total)] / len(pairs)
    if not len(total):
        return None
    low, high = np.quantile(total, (0.025, 0.975)).tolist()
    return [low, high]


def _rates(measured: Measured, rows: NDArray[np.int64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(measured.tokens[rows].sum(axis=1) / measured.decode[rows].sum(axis=1))


def count_lengths(answers: Sequence[Answer]) -> dict[str, float | None]:
    """Emitted tokens per step of some answers, three ways, and how much they repeat themselves."""
    free = [loop_free_steps(answer.token_ids, answer.emitted) for answer in answers]
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    return {
        "tau_mean": mean(answer.tau for answer in answers),
        "tau_pooled": mean(count for answer in answers for count in answer.emitted),
        "tau_loop_free": mean(mean(steps) for steps in free),
        "loop_share": divide(sum(count_repeats(answer.token_ids) for answer in answers), num_tokens),
    }


def count_positions(answers: Sequence[Answer]) -> dict[str, list[int]]:
    """How often a position of the block was drafted and how often the accepted path reached it, from position 1 on.

    An answer's last step is left out: where the answer ends, what was drafted behind it is neither right nor wrong.
    """
    drafted: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for answer in answers:
        steps = list(zip(answer.block_sizes, answer.verify_sizes, answer.emitted, strict=True))
        for block, verify, emitted in steps[:-1]:
            drafted.update(range(1, min(block, verify)))
            accepted.update(range(1, emitted))
    positions = range(1, max(drafted, default=0) + 1)
    return {"drafted": [drafted[place] for place in positions], "accepted": [accepted[place] for place in positions]}


def split_steps(answers: Sequence[Answer]) -> dict[str, float] | None:
    """Mean milliseconds of a step's parts; what is left of it is keeping, observing and text."""
    longest = [answer for answer in longest_answers(answers) if answer.emitted]
    num_steps = sum(len(answer.emitted) for answer in longest)
    if not num_steps:
        return None
    parts = {
        name: 1e3 * sum(getattr(answer, f"{name}_seconds") for answer in longest) / num_steps
        for name in ("draft", "verify", "pilot")
    }
    whole = 1e3 * sum(answer.decode_seconds for answer in longest) / num_steps
    return parts | {"other": max(0.0, whole - sum(parts.values()))}


def histogram(values: Iterable[int]) -> dict[str, int]:
    """Counts by value; keys are text because JSON has no others."""
    return {str(value): count for value, count in sorted(Counter(values).items())}


def mean(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return divide(sum(known), len(known))


def divide(value: float | None, by: float | None) -> float | None:
    return None if value is None or not by else float(value / by)
