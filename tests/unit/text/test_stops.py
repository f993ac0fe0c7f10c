"""Stop strings in a stream: nothing of a stop string is ever shown, nothing else is ever lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.text.stops import StopMatcher

PIECES = st.lists(st.text("ab", max_size=4), max_size=12)


def feed(stops: list[str], pieces: list[str]) -> tuple[StopMatcher, list[str]]:
    matcher = StopMatcher(stops)
    return matcher, [matcher.push(piece) for piece in pieces]


def test_without_stops_everything_passes_at_once() -> None:
    matcher, shown = feed([], ["a", "", "bc"])
    assert shown == ["a", "", "bc"]
    assert not matcher.is_stopped
    assert matcher.flush() == ""


def test_text_before_the_stop_is_shown_and_nothing_after_its_start() -> None:
    matcher, shown = feed(["END"], ["so it goes", " END of", " it"])
    assert shown == ["so it goes", " ", ""]
    assert matcher.is_stopped
    assert matcher.flush() == ""


def test_a_stop_over_several_pieces_is_held_back_until_it_is_decided() -> None:
    matcher, shown = feed(["\n\nQ:"], ["one\n", "\n", "Q", ":"])
    assert shown == ["one", "", "", ""]
    assert matcher.is_stopped


def test_a_false_alarm_is_given_out_again() -> None:
    matcher, shown = feed(["abc"], ["xab", "d", "ab"])
    assert shown == ["x", "abd", ""]
    assert matcher.flush() == "ab"
    assert matcher.flush() == ""


def test_a_held_back_tail_may_start_the_stop_later_than_thought() -> None:
    matcher, shown = feed(["aab"], ["aa", "ab", "b"])
    assert "".join(shown) == "a"
    assert matcher.is_stopped


@pytest.mark.parametrize("stops", [["cd", "b"], ["b", "cd"]])
def test_the_earliest_of_several_stops_wins(stops: list[str]) -> None:
    matcher, shown = feed(stops, ["abcd"])
    assert shown == ["a"]
    assert matcher.is_stopped


@given(st.text("ab", min_size=1, max_size=4), PIECES)
def test_one_stop_is_found_however_the_text_is_cut(stop: str, pieces: list[str]) -> None:
    matcher, shown = feed([stop], pieces)
    text = "".join(pieces)
    assert matcher.is_stopped == (stop in text)
    assert "".join(shown) + matcher.flush() == text.split(stop)[0]


@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), PIECES)
def test_what_was_shown_is_a_beginning_without_any_stop(stops: list[str], pieces: list[str]) -> None:
    matcher, shown = feed(stops, pieces)
    text, visible = "".join(pieces), "".join(shown)
    assert text.startswith(visible)
    assert not any(stop in visible for stop in stops)
    assert matcher.is_stopped == any(stop in text for stop in stops)
    if not matcher.is_stopped:
        assert visible + matcher.flush() == text
