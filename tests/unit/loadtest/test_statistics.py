"""Records, and what they add up to."""

import math
from typing import Any

import pytest

from blockpilot.loadtest.config import Limits, Load
from blockpilot.loadtest.driver import Run
from blockpilot.loadtest.records import Failure, Record
from blockpilot.loadtest.statistics import count_failures, keeps, spread, summarize


def make_record(number: int = 0, *, sent: float = 10.0, times: tuple[float, ...] = (), **changes: Any) -> Record:
    ended = max((sent, *times))
    known: dict[str, Any] = {"planned": sent, "ended": ended, "num_tokens": len(times), "finish_reason": "length"}
    return Record(number=number, prompt_id=f"p{number}", sent=sent, chunk_times=times, **(known | changes))


def test_times_of_a_record() -> None:
    record = make_record(sent=10.0, planned=9.75, times=(10.5, 11.0, 13.0), num_tokens=6, ended=13.25)
    assert (record.ttft, record.tpot, record.gaps, record.whole) == (0.5, 0.5, [0.5, 2.0], 3.25)
    assert record.delay == 0.25 and record.is_ok
    shown = record.as_json(began=9.0)
    assert shown["sent_ms"] == 1000 and shown["ttft_ms"] == 500 and shown["gaps_ms"] == [500, 2000]
    assert shown["num_chunks"] == 3 and shown["num_tokens"] == 6 and shown["error"] is None


def test_times_that_are_not_known() -> None:
    empty = make_record(num_tokens=0)
    assert (empty.ttft, empty.tpot, empty.gaps) == (None, None, [])
    assert make_record(times=(11.0,)).tpot is None
    early = make_record(planned=10.5)  # a clock that is coarse
    assert early.delay == 0
    failed = make_record(failure=Failure("http 500", "gone")).as_json(0.0)
    assert failed["error"] == {"kind": "http 500", "message": "gone"} and failed["ttft_ms"] is None


def test_spreads() -> None:
    found = spread([*(index / 1000 for index in range(101)), None])
    assert found == pytest.approx({"mean": 50.0, "p50": 50.0, "p90": 90.0, "p99": 99.0})
    assert spread([None]) is None and spread([]) is None


def make_run(records: list[Record], *, num_requests: int | None = None, **load: Any) -> Run:
    return Run(Load(**load), num_requests or len(records), began=10.0, records=records)


def test_a_row_counts_what_was_answered() -> None:
    good = make_record(0, times=(10.1, 10.2, 10.3), num_tokens=5, num_prompt_tokens=4)
    late = make_record(1, sent=11.0, times=(12.0, 12.5), finish_reason="stop", has_usage=False)
    lost = make_record(2, sent=11.0, ended=14.0, times=(11.5,), num_tokens=1, failure=Failure("timeout"))
    row = summarize(make_run([good, late, lost], rate=2.0), Limits(ttft=500.0))
    assert (row["rate"], row["concurrency"], row["num_ok"], row["num_failed"]) == (2.0, None, 2, 1)
    assert row["duration_seconds"] == 4.0 and row["requests_per_second"] == 0.5
    assert (row["num_output_tokens"], row["num_prompt_tokens"], row["output_tokens_per_second"]) == (7, 4, 1.75)
    assert row["tokens_per_chunk"] == pytest.approx(7 / 5) and row["num_without_usage"] == 1
    assert row["ttft_ms"]["p50"] == pytest.approx(550) and row["gap_ms"]["mean"] == pytest.approx(700 / 3)
    assert row["goodput"] == 0.25 and row["goodput_share"] == pytest.approx(1 / 3)
    assert row["failures"] == {"timeout": 1} and row["finish_reasons"] == {"length": 1, "stop": 1}
    assert row["is_complete"]


def test_rows_of_nothing() -> None:
    row = summarize(make_run([], num_requests=3, rate=math.inf), Limits())
    assert row["rate"] == "inf" and not row["is_complete"] and row["requests_per_second"] is None
    assert row["ttft_ms"] is None and row["goodput"] is None and row["goodput_share"] is None
    failed = [make_record(index, failure=Failure("http 500")) for index in range(2)]
    row = summarize(make_run(failed, concurrency=2), Limits(tpot=1.0))
    assert row["num_ok"] == 0 and row["goodput_share"] == 0 and row["tokens_per_chunk"] is None


def test_limits() -> None:
    record = make_record(times=(10.1, 10.2, 10.3))  # 100 ms, then 100 ms per token
    for limits, kept in (
        (Limits(), True),
        (Limits(ttft=101), True),
        (Limits(ttft=99), False),
        (Limits(tpot=101), True),
        (Limits(ttft=101, tpot=99), False),
    ):
        assert keeps(record, limits) is kept, limits
    assert keeps(make_record(times=(10.1,)), Limits(tpot=1e-3))  # one token has no time per further token
    assert not keeps(make_record(ended=11.0, num_tokens=0), Limits(ttft=500))  # judged by its whole time
    assert not keeps(make_record(failure=Failure("timeout")), Limits())


def test_failures_by_their_number() -> None:
    kinds = ["a", "b", "b", None, "c", "b", "c"]
    records = [make_record(failure=None if kind is None else Failure(kind)) for kind in kinds]
    assert list(count_failures(records).items()) == [("b", 3), ("c", 2), ("a", 1)]
