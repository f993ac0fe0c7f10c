"""Where an answer starts to repeat itself."""

import pytest

from blockpilot.text.loops import count_repeats, find_loop


def test_the_first_token_that_completes_a_repetition() -> None:
    text = [1, 2, 3, 4, 5, 1, 2, 3, 4]
    assert find_loop(text, size=3) == 7
    assert find_loop(text, size=4) == 8
    assert find_loop(text, size=5) == len(text)


def test_default_size() -> None:
    assert find_loop([7] * 40) == 16
    assert find_loop(list(range(10)) * 4) == 25
    assert find_loop(list(range(40))) == 40


@pytest.mark.parametrize("count", [0, 1, 15])
def test_short_answers_have_no_loop(count: int) -> None:
    assert find_loop([3] * count) == count


def test_every_repeated_token_counts() -> None:
    assert count_repeats([1, 2, 3, 1, 2, 3, 4], size=3) == 1
    assert count_repeats([7] * 40) == 24
    assert count_repeats(list(range(40))) == 0
