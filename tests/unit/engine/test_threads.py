"""One LLM, many threads: requests of all of them share steps, and errors stay with those whose they are."""

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from blockpilot import LLM, SamplingParams
from blockpilot.core.errors import BlockPilotError
from blockpilot.core.records import Completion
from tests.tiny import make_dflash, make_llm

PROMPTS = ["abc", "hello there", "the quick brown fox", "Z", "12 + 30 =", "a b c d e f g"]
PILOTS = ["ar", "fixed:4", "tree:7"]
PARAMS = [
    SamplingParams(max_new_tokens=8, ignore_eos=True),
    SamplingParams(max_new_tokens=5, temperature=0.9, seed=7, ignore_eos=True),
    SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.8, top_k=20, seed=1, ignore_eos=True),
]
PATIENCE = 120  # seconds; a lock that nobody lets go of fails the test instead of hanging it


def run_together(works: list[Callable[[], object]]) -> list[object]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(work) for work in works]]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(drafter=make_dflash())


@pytest.fixture(scope="module")
def expected(llm: LLM) -> dict[tuple[int, int], str]:
    """Plain answers, one at a time."""
    return {
        (p, s): llm.generate(prompt, params, pilot="ar", is_raw=True).text
        for p, prompt in enumerate(PROMPTS)
        for s, params in enumerate(PARAMS)
    }


def test_eight_threads_with_two_hundred_requests_each(llm: LLM, expected: dict[tuple[int, int], str]) -> None:
    batches: list[int] = []
    launch = llm.engine.pipeline.launch

    def count(sequences, **options):  # type: ignore[no-untyped-def]
        batches.append(len(sequences))
        return launch(sequences, **options)

    llm.engine.pipeline.launch = count  # type: ignore[method-assign]

    def work(number: int) -> int:
        choose, right = random.Random(number), 0
        for _ in range(50):
            picks = [(choose.randrange(len(PROMPTS)), choose.randrange(len(PARAMS))) for _ in range(4)]
            pilot = choose.choice(PILOTS)
            prompts, params = [PROMPTS[p] for p, _ in picks], [PARAMS[s] for _, s in picks]
            if number % 2:
                found = llm.generate(prompts, params, pilot=pilot, is_raw=True)
                right += sum(one.text == expected[pick] for one, pick in zip(found, picks, strict=True))
                continue
            for prompt, one, pick in zip(prompts, params, picks, strict=True):
                shown = "".join(update.new_text for update in llm.stream(prompt, one, pilot=pilot, is_raw=True))
                right += shown == expected[pick]
        return right

    assert run_together([lambda number=number: work(number) for number in range(8)]) == [200] * 8
    assert max(batches) == 4, "requests of several threads share their steps"
    assert llm.engine.runner.cache.num_free == 4 and not llm.engine.has_work and not llm.desk._boxes


def test_aborted_streams_take_nothing_from_the_others(llm: LLM, expected: dict[tuple[int, int], str]) -> None:
    def leave(number: int) -> bool:
        for turn in range(40):
            stream = llm.stream(PROMPTS[turn % 6], PARAMS[turn % 3], pilot=PILOTS[number % 3], is_raw=True)
            for _ in range(turn % 4):
                next(stream, None)
            stream.close()  # type: ignore[attr-defined]
        return True

    def stay() -> bool:
        return all(
            llm.generate(PROMPTS[p], PARAMS[s], pilot="fixed:4", is_raw=True).text == text
            for (p, s), text in expected.items()
        )

    works: list[Callable[[], object]] = [stay, stay, *(lambda number=number: leave(number) for number in range(4))]  # type: ignore[misc]
    assert all(run_together(works))
    assert llm.engine.runner.cache.num_free == 4 and not llm.engine.has_work


def test_a_slow_reader_stops_nobody(llm: LLM, expected: dict[tuple[int, int], str]) -> None:
    slow = llm.stream(PROMPTS[2], PARAMS[0], is_raw=True)
    first = next(slow).new_text
    results = run_together([lambda: llm.generate(PROMPTS[0], PARAMS[0], is_raw=True).text] * 3)
    assert results == [expected[0, 0]] * 3
    assert first + "".join(update.new_text for update in slow) == expected[2, 0]


def test_a_failed_pass_ends_the_requests_in_it_and_nobody_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(drafter=make_dflash())
    text = llm.generate("abc", PARAMS[0], pilot="ar", is_raw=True).text
    verify, calls = llm.engine.runner.verify, iter(range(10**6))

    def fail_sometimes(*given: object) -> object:
        if next(calls) % 5 == 3:
            raise RuntimeError("out of memory")
        return verify(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine.runner, "verify", fail_sometimes)

    def ask() -> tuple[int, int]:
        right = failed = 0
        for _ in range(30):
            try:
                right += llm.generate("abc", PARAMS[0], pilot="fixed:4", is_raw=True).text == text
            except (RuntimeError, BlockPilotError) as error:
                failed += "out of memory" in str(error)
        return right, failed

    counts = run_together([ask] * 6)
    assert all(right + failed == 30 for right, failed in counts)  # type: ignore[misc]
    assert any(failed for _, failed in counts)  # type: ignore[misc]
    assert llm.engine.runner.cache.num_free == 4 and not llm.engine.has_work


def test_an_interrupted_leader_leaves_the_others_with_an_error_and_a_working_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make_llm()
    stream = llm.stream("abc", PARAMS[0], is_raw=True)
    next(stream)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "prefill", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate("hello", PARAMS[0], is_raw=True)
    shown = "".join(update.new_text for update in stream)  # it was not in the pass that was interrupted
    assert shown and llm.generate("hello", PARAMS[0], is_raw=True).num_tokens == 8


def test_who_wants_the_engine_alone_gets_it_between_steps() -> None:
    llm = make_llm()
    long = SamplingParams(max_new_tokens=60, ignore_eos=True)
    stop = threading.Event()

    def keep_busy() -> Completion:
        found = llm.generate("abc", long, is_raw=True)
        while not stop.is_set():
            found = llm.generate("abc", long, is_raw=True)
        return found

    def look() -> int:
        seen = 0
        for _ in range(20):
            with llm.desk.alone():
                before = llm.engine.scheduler.decoding and len(llm.engine.scheduler.decoding[0].output_ids)
                time.sleep(0.002)
                after = llm.engine.scheduler.decoding and len(llm.engine.scheduler.decoding[0].output_ids)
                seen += before == after
        stop.set()
        return seen

    *busy, seen = run_together([keep_busy, keep_busy, look])
    assert seen == 20
    assert all(completion.num_tokens == 60 for completion in busy)  # type: ignore[attr-defined]


def test_a_pilot_by_name_is_one_object_for_all_threads() -> None:
    llm = make_llm(drafter=make_dflash())
    found = run_together([lambda: llm.resolve_pilot("tree:5")] * 8)
    assert len({id(pilot) for pilot in found}) == 1
