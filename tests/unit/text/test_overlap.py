"""Keeping training prompts apart from test prompts."""

from blockpilot.text.overlap import NUM_WORDS, without_overlap

WORDS = [f"word{index}" for index in range(40)]


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
