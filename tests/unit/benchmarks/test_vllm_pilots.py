"""The parts of the vLLM benchmark that need no vLLM."""

from argparse import Namespace

import pytest
from vllm_pilots import Measured, ratio_interval, read_groups


def test_rates_are_totals_over_totals():
    found = Measured(tokens=[10, 30], seconds=[1.0, 1.0], num_steps=16, accepted_tokens=24)
    assert found.tokens_per_second == 20 and found.tokens_per_step == 2.5


def test_the_interval_is_paired():
    """Prompts differ tenfold in speed; the method is 1.1 times as fast on each of them."""
    other = Measured(tokens=[100] * 6, seconds=[1.0, 2.0, 3.0, 5.0, 8.0, 10.0])
    ours = Measured(tokens=[100] * 6, seconds=[seconds / 1.1 for seconds in other.seconds])
    assert ratio_interval(ours, other) == pytest.approx([1.1, 1.1])


def test_calibration_and_test_prompts_are_disjoint():
    arguments = Namespace(tasks="gsm8k,mt_bench", num_prompts=4, calibration_prompts=2, batch_size=3)
    judged, chosen = (read_groups(arguments, is_calibration=flag) for flag in (False, True))
    assert [len(group) for group in judged] == [3, 3, 2] and [len(group) for group in chosen] == [3, 1]
    assert not {prompt for group in judged for prompt in group} & {prompt for group in chosen for prompt in group}
