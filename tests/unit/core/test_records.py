import pytest

from blockpilot.core.records import Completion, StepRecord


def make_completion(emitted: list[int], decode_seconds: float = 2.0) -> Completion:
    seconds = {"draft_seconds": 0.1, "verify_seconds": 0.2, "pilot_seconds": 0.5}
    return Completion(
        text="",
        token_ids=list(range(1 + sum(emitted))),
        num_prompt_tokens=3,
        finish_reason="stop",
        prefill_seconds=0.1,
        decode_seconds=decode_seconds,
        steps=[StepRecord(block_size=8, verify_size=8, emitted=count, **seconds) for count in emitted],
    )


def test_the_first_token_belongs_to_no_step():
    completion = make_completion([3, 1])
    assert (completion.num_tokens, completion.num_steps) == (5, 2)
    assert completion.tau == 2.0
    assert completion.tokens_per_second == 2.0
    assert completion.pilot_seconds == pytest.approx(1.0)


def test_rates_are_unknown_without_steps():
    completion = make_completion([])
    assert completion.tau is None
    assert completion.tokens_per_second is None


def test_rate_is_unknown_when_the_clock_did_not_move():
    assert make_completion([1], decode_seconds=0.0).tokens_per_second is None
