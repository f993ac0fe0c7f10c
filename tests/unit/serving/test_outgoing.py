"""Which updates leave at once, and which wait for others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.core.records import Completion, StepRecord, TokenScore, Update
from blockpilot.serving.outgoing import Outgoing

INTERVAL = 0.02
END = Completion(
    text="", token_ids=[], num_prompt_tokens=1, finish_reason="stop", prefill_seconds=0.0, decode_seconds=0.0
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(emitted: int) -> StepRecord:
    return StepRecord(1, 1, emitted, 0.0, 0.0, 0.0)


def test_the_first_and_the_last_update_leave_at_once() -> None:
    outgoing = Outgoing(INTERVAL, Clock())
    assert outgoing.pass_on([Update(1, "a", None)]) == [Update(1, "a", None)]
    assert outgoing.pass_on([Update(1, "b", None, [step(2)], [TokenScore(7, -1.0)])]) == []
    assert outgoing.pass_on([Update(2, "x", None)]) == [Update(2, "x", None)]  # another request's first
    assert outgoing.pass_on([Update(1, "c", END, [step(3)], [TokenScore(8, -2.0)])]) == [
        Update(1, "bc", END, [step(2), step(3)], [TokenScore(7, -1.0), TokenScore(8, -2.0)])
    ]


def test_all_leave_when_the_interval_is_over() -> None:
    clock = Clock()
    outgoing = Outgoing(INTERVAL, clock)
    outgoing.pass_on([Update(1, "a", None), Update(2, "x", None)])
    assert outgoing.pass_on([Update(1, "b", None), Update(2, "y", None)]) == []
    clock.now += INTERVAL
    assert outgoing.pass_on([Update(2, "z", None)]) == [Update(1, "b", None), Update(2, "yz", None, [], [])]
    assert outgoing.pass_on([Update(1, "c", None)]) == []  # the next interval has begun
    assert outgoing.flush() == [Update(1, "c", None)]
    assert outgoing.flush() == []


def test_an_interval_of_zero_holds_nothing() -> None:
    outgoing = Outgoing(0.0, Clock())
    for text in "abc":
        assert outgoing.pass_on([Update(1, text, None)]) == [Update(1, text, None)]


@pytest.mark.parametrize("ends", [True, False])
def test_a_number_that_comes_again_is_a_new_request(ends: bool) -> None:
    outgoing = Outgoing(INTERVAL, Clock())
    outgoing.pass_on([Update(1, "a", None)])
    if ends:
        outgoing.pass_on([Update(1, "", END)])
    else:
        outgoing.forget([1])
    assert outgoing.pass_on([Update(1, "b", None)]) == [Update(1, "b", None)]


@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3), st.floats(0, 0.03)), max_size=40))
def test_no_text_is_lost_or_moved(came: list[tuple[int, str, float]]) -> None:
    clock = Clock()
    outgoing, sent, wanted = Outgoing(INTERVAL, clock), dict.fromkeys(range(4), ""), dict.fromkeys(range(4), "")
    for request_id, text, seconds in came:
        clock.now += seconds
        wanted[request_id] += text
        for update in outgoing.pass_on([Update(request_id, text, None)]):
            sent[update.request_id] += update.new_text
    for update in outgoing.flush():
        sent[update.request_id] += update.new_text
    assert sent == wanted
