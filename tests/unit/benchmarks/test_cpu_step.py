"""Texts that part are compared up to where they do."""

import cpu_step


def test_only_tokens_before_the_first_difference_count() -> None:
    assert cpu_step.equal_share([1, 2, 3, 4], [1, 2, 3, 4]) == 1.0
    assert cpu_step.equal_share([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert cpu_step.equal_share([1, 2], [3, 2]) == 0.0
