"""Rows: what they hold and in which order."""

from typing import Any

import pytest

from blockpilot.bench.audit import Difference
from blockpilot.bench.rows import build_rows
from tests.unit.bench.pieces import make_answer

CONTRACT = [
    "task",
    "method",
    "model",
    "temperature",
    "num_prompts",
    "num_tokens",
    "num_steps",
    "tau_mean",
    "tau_pooled",
    "tau_loop_free",
    "loop_share",
    "tokens_per_second",
    "speedup",
    "speedup_ci",
    "end_to_end_speedup",
    "mismatches",
    "near_ties",
    "manifest",
]
METHODS = ("ar", "dflash:4", "best-fixed")


def facts(tasks: tuple[str, ...], methods: tuple[str, ...] = METHODS) -> dict[str, Any]:
    arguments = {"temperature": 0.0, "methods": list(methods)}
    return {"tasks": tasks, "manifest": {"target": "model", "id": "abc", "arguments": arguments}}


def answers(task: str, factor: float) -> list:
    found = []
    for place in range(2):
        where = {"task": task, "prompt_id": f"q{place}", "batch": place}
        for repeat in range(2):
            found += [
                make_answer([1] * 6, seconds=6.0, repeat=repeat, **where),
                make_answer([3, 3], method="dflash:4", seconds=6.0 / factor, repeat=repeat, **where),
                make_answer([2, 2, 2], method="best-fixed", seconds=3.0, repeat=repeat, **where),
            ]
    return found


def test_rows_of_tasks_and_their_mean() -> None:
    odd = [
        Difference("one", "dflash:4", "q0", 0, 0, 3, gap, is_near_tie=gap < 1)
        for gap in (2e-5, 3.5)  # a near-tie and a mismatch
    ]
    scores = {("one", "ar"): [True, False]}
    rows = build_rows(answers("one", 2.0) + answers("two", 4.0), odd, scores, **facts(("one", "two")))
    assert [(row["task"], row["method"]) for row in rows] == [
        (task, method) for task in ("one", "two", "mean") for method in METHODS
    ]
    first = rows[1]
    assert list(first)[: len(CONTRACT)] == CONTRACT
    assert (first["num_prompts"], first["num_tokens"], first["num_steps"]) == (2, 14, 4)  # of the first repeat
    assert (first["tau_mean"], first["speedup"], first["tokens_per_second"]) == (3.0, 2.0, 2.0)
    assert first["speedup_ci"] == [2.0, 2.0]
    assert (first["mismatches"], first["near_ties"], first["largest_gap"]) == (1, 1, 3.5)
    assert first["over_best_fixed"] == {"ratio": 1.0, "ci": [1.0, 1.0]}
    assert first["emitted_histogram"] == {"3": 4} and first["peak_memory_bytes"] == 100
    assert first["time_to_first_token"] == 0.5
    assert first["best_fixed_of_task"] == {"method": "dflash:4", "speedup": 2.0}
    assert first["per_prompt"][1] == {"id": "q1", "tau": 3.0, "tokens_per_second": 2.0}
    assert (rows[0]["score"], rows[0]["num_scored"], first["score"]) == (0.5, 2, None)
    mean = rows[7]
    assert set(CONTRACT) <= mean.keys() and "per_prompt" not in mean
    assert (mean["speedup"], mean["num_prompts"], mean["mismatches"]) == (3.0, 4, 1)
    assert mean["over_best_fixed"]["ratio"] == pytest.approx(1.5)


def test_every_method_is_compared_with_one_chain_the_best_of_the_run() -> None:
    methods = ("ar", "dflash:4", "dflash:8", "auto")
    seconds = {
        "one": (6.0, 3.0, 2.0, 1.5),
        "two": (6.0, 1.0, 2.0, 1.5),
    }  # dflash:4 is 2 and 6 times as fast, :8 3 and 3
    found = [
        make_answer([1] * 6, task=task, method=method, seconds=time, prompt_id=f"q{place}", batch=place)
        for task, times in seconds.items()
        for method, time in zip(methods, times, strict=True)
        for place in range(2)
    ]
    rows = build_rows(found, [], {}, **facts(("one", "two"), methods))
    over = {(row["task"], row["method"]): row["over_best_chain"] for row in rows}
    assert over["one", "auto"] == {"method": "dflash:4", "ratio": 2.0, "ci": [2.0, 2.0]}  # though dflash:8 is best here
    assert over["two", "auto"]["ratio"] == pytest.approx(2 / 3) and over["two", "auto"]["method"] == "dflash:4"
    assert over["mean", "auto"]["ratio"] == pytest.approx((2 + 2 / 3) / 2)
    assert over["mean", "auto"]["ci"] == pytest.approx([(2 + 2 / 3) / 2] * 2)
    assert over["mean", "dflash:8"]["ratio"] == pytest.approx((1.5 + 0.5) / 2)
    assert over["one", "dflash:4"] is None and over["mean", "dflash:4"] is None
    alone = build_rows(found, [], {}, **facts(("one", "two"), ("ar", "auto")))
    assert {row["over_best_chain"] for row in alone} == {None}


def test_a_prompt_has_the_tau_of_its_first_repeat_and_the_speed_of_all() -> None:
    found = [
        make_answer([3, 3], seconds=2.0),  # two turns of one prompt
        make_answer([1] * 4, seconds=2.0, turn=1),
        make_answer([2, 2, 2], seconds=1.0, repeat=1),  # a near-tie led to another text
        make_answer([1] * 6, seconds=3.0, repeat=1, turn=1),
    ]
    (row,) = build_rows(found, [], {}, **facts(("quiz",), ("ar",)))
    assert row["per_prompt"] == [{"id": "q0", "tau": (3 + 1) / 2, "tokens_per_second": (6 + 4 + 6 + 6) / 8}]
    assert row["per_prompt"][0]["tau"] == row["tau_mean"]


def test_one_task_needs_no_mean() -> None:
    rows = build_rows(answers("one", 2.0), [], {}, **facts(("one",), METHODS))
    assert {row["task"] for row in rows} == {"one"}
