"""The paper's claims, each with a rule that decides from what was measured."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pilot_study.intervals import Bootstrap, Estimate

from blockpilot.bench.methods import PAPER
from paper_study.evidence import Evidence, Half, decode_ms

CONFIRMED, NOT_CONFIRMED, NOT_TESTABLE = "confirmed", "not confirmed", "not testable here"
NEAR = 2  # sizes from the trained one
SWEEP = range(8, 25)  # of the paper's figures 3a to 3c
NEGLIGIBLE = 0.01  # of the time of an answer
_MISSING = "the stage that measures it has not ended"


@dataclass(frozen=True)
class Verdict:
    claim: str
    verdict: str
    rule: str
    found: str


def judge(evidence: Evidence) -> list[Verdict]:
    each = (_differs, _is_near, _lengthens, _speeds_up, _beats_fixed, _has_best_radius, _has_best_input, _beats_eagle3)
    verdicts = [rule(evidence, half) for rule in each for half in evidence.halves]
    return [*verdicts, _gains_more_hot(evidence), _is_cheap(evidence), _is_lossless(evidence), _other_models(evidence)]


def _at(half: Half) -> str:
    return f" (T = {half.temperature:g})"


def _decide(claim: str, rule: str, is_true: bool | None, found: str = _MISSING) -> Verdict:
    """None: it could not be measured."""
    verdict = NOT_TESTABLE if is_true is None else CONFIRMED if is_true else NOT_CONFIRMED
    return Verdict(claim, verdict, rule, found)


def _percent(estimate: Estimate) -> str:
    return f"{estimate.value:+.1%} [{estimate.low:+.1%}, {estimate.high:+.1%}]"


def _stored(numbers: Mapping[str, Any]) -> Estimate | None:
    """An estimate as rows hold it."""
    return None if None in numbers.values() else Estimate(**numbers)


def _differs(evidence: Evidence, half: Half) -> Verdict:
    claim = "The best block size is a property of the request" + _at(half)
    rule = "a size chosen on one half of an answer beats the best fixed size on the other half (lower bound above 0)"
    row = half.split()
    gain = row and _stored(row["gain_over_best_fixed"])
    if row is None or not gain:
        return _decide(claim, rule, None)
    oracle = _stored(row["oracle_gain_over_best_fixed"])
    found = f"{_percent(gain)} over {row['num_requests']} requests"
    return _decide(
        claim, rule, gain.low > 0, found + (f"; the half's own best size: {_percent(oracle)}" if oracle else "")
    )


def _is_near(evidence: Evidence, half: Half) -> Verdict:
    claim = f"Best sizes lie near the trained one{_at(half)}"
    rule = (
        f"more than half of the requests have their best size within {NEAR} of it (lower bound), among all of 8 to 24"
    )
    shares = near_shares(evidence, half)
    if shares is None:
        return _decide(claim, rule, None)
    places, near = shares
    estimate = Bootstrap(places).mean(near)
    found = f"{estimate.value:.0%} [{estimate.low:.0%}, {estimate.high:.0%}] of {len(near)} requests"
    return _decide(claim, rule, estimate.low > 0.5, found)


def swept_sizes(half: Half) -> list[int]:
    """Of the figures: those of 8 to 24 that were replayed, or all where few were."""
    assert half.sweep is not None
    sizes = [size for size in half.sweep.sizes if size in SWEEP]
    return sizes if len(sizes) > NEAR * 2 else list(half.sweep.sizes)


def best_sizes(half: Half) -> np.ndarray:
    """Of every request, the smallest where several are."""
    assert half.sweep is not None
    sizes = swept_sizes(half)
    return np.array(sizes)[half.sweep.columns(sizes).argmax(axis=1)]


def near_shares(evidence: Evidence, half: Half, reach: int = NEAR) -> tuple[Sequence[str], np.ndarray] | None:
    """Tasks of all requests, and 1 where the best size is near the trained one."""
    if half.sweep is None or evidence.trained is None:
        return None
    return half.sweep.tasks, (abs(best_sizes(half) - evidence.trained) <= reach).astype(float)


def _over_trained(evidence: Evidence, half: Half, name: str) -> Estimate | None:
    """What the pilot gains over the trained size on the prompts of Table 2."""
    return None if evidence.trained is None else half.compare(PAPER, f"dflash:{evidence.trained}", name)


def _lengthens(evidence: Evidence, half: Half) -> Verdict:
    claim = "A longer acceptance length than DFlash at the trained size" + _at(half)
    rule = "lower bound of the gain in tau above 0"
    row, timed = half.judged().get("as published"), _over_trained(evidence, half, "tau")
    gain = row and _stored(row["gain_over_trained"])
    if row is None or not gain:
        return _decide(claim, rule, None)
    found = f"{_percent(gain)} over {row['num_requests']} test requests by replay"
    found += f"; {_percent(timed)} over those of Table 2" if timed else ""
    return _decide(claim, rule, gain.low > 0, found)


def _speeds_up(evidence: Evidence, half: Half) -> Verdict:
    claim = "Faster than DFlash at the trained size" + _at(half)
    rule = "lower bound of the gain in tokens per second above 0"
    gain = _over_trained(evidence, half, "tokens_per_second")
    return _decide(claim, rule, gain.low > 0, _percent(gain)) if gain else _decide(claim, rule, None)


def _beats_fixed(evidence: Evidence, half: Half) -> Verdict:
    claim = "Better than one size for all requests" + _at(half)
    rule = "tau above that of the best fixed size, which is chosen on training prompts (lower bound above 0)"
    row = half.judged().get("as published")
    gain = row and _stored(row["gain_over_best_fixed"])
    if row is None or not gain:
        return _decide(claim, rule, None)
    found = (
        f"{_percent(gain)} over a fixed {row['best_fixed']}; it names the best size in {row['accuracy']:.0%} of the "
    )
    found += f"requests, that fixed size does in {row['accuracy_of_best_fixed']:.0%}"
    return _decide(claim, rule, gain.low > 0, found)


def _is_best(half: Half, claim: str, others: Sequence[str]) -> Verdict:
    rule = "the published network's gain in tau over the trained size has its lower bound above the others' gains"
    rows = half.judged()
    found = {name: _stored(rows[name]["gain_over_trained"]) for name in ("as published", *others) if name in rows}
    ours = found.pop("as published", None)
    known = {name: one for name, one in found.items() if one}
    if ours is None or not known:
        return _decide(claim + _at(half), rule, None, "not trained here")
    told = "; ".join([f"as published {_percent(ours)}", *(f"{name} {one.value:+.1%}" for name, one in known.items())])
    return _decide(claim + _at(half), rule, all(ours.low > one.value for one in known.values()), told)


def _has_best_radius(evidence: Evidence, half: Half) -> Verdict:
    return _is_best(half, "k = 2 is the best radius", ("k = 1", "k = 3"))


def _has_best_input(evidence: Evidence, half: Half) -> Verdict:
    others = tuple(f"inputs: {name}" for name in ("logits", "normalised", "softmax"))
    return _is_best(half, "Raw probabilities are the best input", others)


def _beats_eagle3(evidence: Evidence, half: Half) -> Verdict:
    claim = "DFlash at the trained size is faster than EAGLE-3" + _at(half)
    rule = "lower bound of the gain in tokens per second above 0"
    gain = (
        None if evidence.trained is None else half.compare(f"dflash:{evidence.trained}", "eagle3", "tokens_per_second")
    )
    if gain is None:
        return _decide(claim, rule, None, "no row of both")
    return _decide(claim, rule, gain.low > 0, _percent(gain))


def _gains_more_hot(evidence: Evidence) -> Verdict:
    claim = "The gain is larger at T = 1 than at T = 0"
    rule = "the interval of the gain in tau over the trained size lies above the other one's"
    rows = {half.temperature: half.judged().get("as published") for half in evidence.halves}
    gains = {at: _stored(row["gain_over_trained"]) for at, row in rows.items() if row}
    cold, hot = gains.get(0.0), gains.get(1.0)
    if not cold or not hot:
        return _decide(claim, rule, None, "both temperatures are needed")
    return _decide(claim, rule, hot.low > cold.high, f"T = 1: {_percent(hot)}; T = 0: {_percent(cold)}")


def _is_cheap(evidence: Evidence) -> Verdict:
    claim = "The network costs next to nothing"
    rule = f"a decision takes less than {NEGLIGIBLE:.0%} of the decoding of an answer"
    tables = [half.table for half in evidence.halves if half.table is not None]
    answer_ms = decode_ms(tables[0]) if tables else None
    if not evidence.network or answer_ms is None:
        return _decide(claim, rule, None)
    row = evidence.network[0]
    found = (
        f"{row['decision_ms']:.2f} ms of {answer_ms:,.0f} ms on {row['device']}; {row['num_parameters'] / 1e6:,.0f} M "
    )
    found += f"parameters, {row['parameter_bytes'] / 1e9:.2f} GB"
    return _decide(claim, rule, row["decision_ms"] < NEGLIGIBLE * answer_ms, found)


def _is_lossless(evidence: Evidence) -> Verdict:
    claim, rule = "Lossless acceleration", "every text of every method is that of plain decoding"
    rows = list(_single_rows(evidence))
    if not rows:
        return _decide(claim, rule, None)
    mismatches, near_ties = (sum(row[name] for row in rows) for name in ("mismatches", "near_ties"))
    num_tokens = sum(row["num_tokens"] for row in rows)
    return _decide(
        claim, rule, mismatches == 0, f"{mismatches} mismatches, {near_ties} near-ties, {num_tokens:,} tokens"
    )


def _single_rows(evidence: Evidence) -> Iterator[Mapping[str, Any]]:
    for half in evidence.halves:
        if half.table is not None:
            yield from (row for row in half.table.rows if row["task"] in half.table.tasks)


def _other_models(evidence: Evidence) -> Verdict:
    claim = "4.20 times plain decoding, tau 5.92, with Qwen3-4B at T = 1 (and the tables of three more models)"
    return _decide(
        claim, "the same target and drafter", None, f"the target here is {Path(evidence.config.target).name}"
    )
