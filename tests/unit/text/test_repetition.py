"""Where an answer starts to repeat itself; training prompts kept apart from test prompts."""

import pytest

from blockpilot.text.repetition import NUM_WORDS, count_repeats, find_loop, without_overlap

WORDS = [f"word{index}" for index in range(40)]


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


def text(first: int, count: int) -> str:
    return " ".join(WORDS[first : first + count])


def test_a_shared_run_of_thirteen_words_is_an_overlap() -> None:
    others = [text(0, 20)]
    shared = "Please say, WORD7! " + text(8, NUM_WORDS - 1) + " and more"
    close = "Please say " + text(8, NUM_WORDS - 1) + " and more"
    assert without_overlap([shared, close, "short"], others) == [close, "short"]


def test_short_texts_overlap_when_they_are_equal() -> None:
    assert without_overlap(["What is 2 + 2?", "What is 2 + 3?"], ["what is 2 + 2"]) == ["What is 2 + 3?"]


def test_a_template_that_many_share_is_no_overlap() -> None:
    others = [f"{text(0, 15)} task{index}" for index in range(6)]
    mine = f"{text(0, 14)} mine"
    assert without_overlap([mine, others[3]], others) == [mine]
