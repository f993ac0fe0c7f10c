"""What the records of a load add up to."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from blockpilot.loadtest.config import Limits
from blockpilot.loadtest.driver import Run
from blockpilot.loadtest.records import Record

PERCENTILES = (50, 90, 99)


def summarize(run: Run, limits: Limits) -> dict[str, Any]:
    """One row of the result. Rates and times are those of requests that were answered."""
    good = [record for record in run.records if record.is_ok]
    num_tokens = sum(record.num_tokens for record in good)
    num_chunks = sum(len(record.chunk_times) for record in good)
    kept = sum(keeps(record, limits) for record in good) if limits.are_given else None
    return {
        **_name(run),
        "num_requests": run.num_requests,
        "num_ok": len(good),
        "num_failed": len(run.records) - len(good),
        "is_complete": run.is_complete,
        "failures": count_failures(run.records),
        "duration_seconds": run.duration,
        "requests_per_second": _divide(len(good), run.duration),
        "output_tokens_per_second": _divide(num_tokens, run.duration),
        "num_prompt_tokens": sum(record.num_prompt_tokens or 0 for record in good),
        "num_output_tokens": num_tokens,
        "tokens_per_chunk": _divide(num_tokens, num_chunks),
        "ttft_ms": spread(record.ttft for record in good),
        "tpot_ms": spread(record.tpot for record in good),
        "gap_ms": spread(gap for record in good for gap in record.gaps),
        "whole_ms": spread(record.whole for record in good),
        "goodput": None if kept is None else _divide(kept, run.duration),
        "goodput_share": None if kept is None else _divide(kept, len(run.records)),
        "finish_reasons": dict(Counter(str(record.finish_reason) for record in good)),
        "num_without_usage": sum(not record.has_usage for record in good),
        "send_delay_ms": spread(record.delay for record in run.records),
        "client_cpu_share": run.client_share,
    }


def _name(run: Run) -> dict[str, Any]:
    rate = run.load.rate
    return {"rate": "inf" if rate == float("inf") else rate, "concurrency": run.load.concurrency}


def keeps(record: Record, limits: Limits) -> bool:
    """Whether an answer kept the limits; one without text is judged by its whole time."""
    if not record.is_ok:
        return False
    ttft = record.whole if record.ttft is None else record.ttft
    is_early = limits.ttft is None or 1e3 * ttft <= limits.ttft
    return is_early and (limits.tpot is None or record.tpot is None or 1e3 * record.tpot <= limits.tpot)


def count_failures(records: Sequence[Record]) -> dict[str, int]:
    """By kind, the most frequent first."""
    return dict(Counter(record.failure.kind for record in records if record.failure is not None).most_common())


def spread(seconds: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds, of what is known."""
    values = 1e3 * np.array([value for value in seconds if value is not None], dtype=np.float64)
    if not len(values):
        return None
    found = np.percentile(values, PERCENTILES).tolist()
    return {"mean": float(values.mean())} | {f"p{p}": value for p, value in zip(PERCENTILES, found, strict=True)}


def _divide(value: float, by: float) -> float | None:
    return value / by if by > 0 else None
