"""The arithmetic against cases worked out by hand."""

import pytest

from blockpilot.bench.statistics import (
    add_up,
    count_lengths,
    count_positions,
    divide,
    speedup,
    speedup_interval,
    split_steps,
)
from blockpilot.text.repetition import loop_free_steps
from tests.unit.bench.pieces import make_answer


def test_speed_pools_prompts_and_leaves_prefill_out() -> None:
    ours = add_up([make_answer([3, 1], seconds=1.0), make_answer([4], seconds=3.0, batch=1, prompt_id="q1")])
    plain = add_up([make_answer([1] * 4, seconds=4.0), make_answer([1] * 4, seconds=4.0, batch=1, prompt_id="q1")])
    assert ours.tokens_per_second == 8 / 4 and plain.tokens_per_second == 8 / 8
    assert speedup(ours, plain) == 2.0
    assert divide(ours.end_to_end_rate, plain.end_to_end_rate) == pytest.approx((10 / 5) / (10 / 9))


def test_a_batch_takes_as_long_as_its_longest_request() -> None:
    together = [make_answer([2, 2], seconds=2.0), make_answer([2], seconds=1.0, prompt_id="q1")]
    second_turn = make_answer([4], seconds=3.0, turn=1)
    assert add_up([*together, second_turn]).tokens_per_second == 10 / 5


def test_an_answer_that_ends_with_its_first_token_has_no_speed() -> None:
    silent = [make_answer([], seconds=0.0)]
    assert add_up(silent).tokens_per_second is None and speedup(add_up(silent), add_up(silent)) is None
    assert count_lengths(silent)["tau_mean"] is None and split_steps(silent) is None


def test_the_three_ways_to_count_tau() -> None:
    lengths = count_lengths([make_answer([4, 2]), make_answer([1, 1, 1, 1])])
    assert (lengths["tau_mean"], lengths["tau_pooled"], lengths["loop_share"]) == ((3 + 1) / 2, 10 / 6, 0.0)
    assert lengths["tau_loop_free"] == lengths["tau_mean"]


def test_loop_free_steps_start_before_the_first_repetition() -> None:
    token_ids = [*range(20), *range(20)]  # token 35 is the first to end a 16-gram seen before
    emitted = [10, 10, 10, 9]  # anchors 0, 10, 20, 30
    assert loop_free_steps(token_ids, emitted) == emitted
    assert loop_free_steps(token_ids, [10, 10, 10, 5, 4]) == [10, 10, 10, 5]  # the anchor of the last step is 35
    lengths = count_lengths([make_answer([10, 10, 10, 5, 4], token_ids=token_ids)])
    assert lengths["tau_loop_free"] == 35 / 4 and lengths["loop_share"] == 5 / 40


def test_positions_leave_out_the_last_step_and_what_was_not_drafted() -> None:
    answers = [make_answer([3, 1, 4]), make_answer([2, 1, 1], block_sizes=[4, 1, 4], verify_sizes=[2, 1, 4])]
    assert count_positions(answers) == {"drafted": [3, 2, 2], "accepted": [2, 1, 0]}


def test_a_step_splits_into_its_parts() -> None:
    split = split_steps([make_answer([1, 1], seconds=1.0)])
    assert split == pytest.approx({"draft": 100, "verify": 300, "pilot": 50, "other": 50})


def test_intervals_are_paired_and_repeatable() -> None:
    plain = add_up([make_answer([1] * 4, seconds=1.0 + place, batch=place) for place in range(6)])
    twice = add_up([make_answer([2] * 2, seconds=(1.0 + place) / 2, batch=place) for place in range(6)])
    assert speedup_interval([(twice, plain)]) == pytest.approx([2, 2])  # prompts differ, their ratios do not
    varied = add_up([make_answer([2] * 2, seconds=1.0, batch=place) for place in range(6)])
    first = speedup_interval([(varied, plain), (twice, plain)])
    assert first == speedup_interval([(varied, plain), (twice, plain)])
    assert first is not None and first[0] < first[1]
    one = add_up([make_answer([1])])
    assert speedup_interval([(one, one)]) is None
