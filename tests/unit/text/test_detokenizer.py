"""Tokens become text piece by piece; nothing of a stop string is ever shown, nothing else is ever lost."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from blockpilot.text.detokenizer import IncrementalDetokenizer, StopMatcher
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields

TOKENIZER = Tokenizer.from_gguf(byte_vocabulary_fields(), "test.gguf")
ALL_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)
PIECES = st.lists(st.text("ab", max_size=4), max_size=12)


def stream(ids: Sequence[int]) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(TOKENIZER.decode)
    return [detokenizer.push(token_id) for token_id in ids], detokenizer


@given(st.text(max_size=60))
def test_pieces_join_to_the_text(text: str) -> None:
    ids = TOKENIZER.encode(text)
    pieces, detokenizer = stream(ids)
    expected = TOKENIZER.decode(ids)
    assert detokenizer.text == expected
    assert "".join(pieces) + detokenizer.flush() == expected
    assert detokenizer.text == expected


@given(ALL_IDS)
def test_any_bytes_join_to_what_decoding_gives(ids: list[int]) -> None:
    """Random tokens are mostly invalid UTF-8; what was returned is never taken back."""
    detokenizer, returned = IncrementalDetokenizer(TOKENIZER.decode), ""
    for count, token_id in enumerate(ids, start=1):
        returned += detokenizer.push(token_id)
        assert detokenizer.text == TOKENIZER.decode(ids[:count])
        assert detokenizer.text.startswith(returned)
    assert returned + detokenizer.flush() == TOKENIZER.decode(ids)


@given(ALL_IDS)
def test_pieces_that_are_looked_up_are_those_that_decoding_gives(ids: list[int]) -> None:
    decoding = IncrementalDetokenizer(TOKENIZER.decode)
    looking = IncrementalDetokenizer(TOKENIZER.decode, TOKENIZER.pieces)
    for token_id in ids:
        assert looking.push(token_id) == decoding.push(token_id)
        assert looking.text == decoding.text
    assert looking.flush() == decoding.flush()


def test_whole_characters_are_looked_up_and_parts_of_them_are_decoded() -> None:
    pieces = TOKENIZER.pieces
    assert pieces is not None
    assert [pieces[index] for index in TOKENIZER.encode("aé")] == ["a", "", ""]
    assert pieces[1] == ""  # a special token is skipped

    def refuse(token_ids: Sequence[int]) -> str:
        raise AssertionError(f"{token_ids} need not be decoded")

    detokenizer = IncrementalDetokenizer(refuse, pieces)
    assert [detokenizer.push(index) for index in TOKENIZER.encode("abc")] == ["a", "b", "c"]


def test_emoji_appears_once_it_is_whole() -> None:
    ids = TOKENIZER.encode("a😀b")
    assert len(ids) == 6
    pieces, detokenizer = stream(ids)
    assert pieces == ["a", "", "", "", "😀", "b"]
    assert detokenizer.flush() == ""


def test_half_a_character_is_flushed_as_it_is() -> None:
    pieces, detokenizer = stream(TOKENIZER.encode("a😀")[:3])
    assert pieces == ["a", "", ""]
    assert detokenizer.text == "a\ufffd"
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped() -> None:
    pieces, _ = stream([1, *TOKENIZER.encode("hello"), 2])
    assert "".join(pieces) == "hello"


def test_windows_stay_short() -> None:
    longest = 0

    def watch(token_ids: Sequence[int]) -> str:
        nonlocal longest
        longest = max(longest, len(token_ids))
        return TOKENIZER.decode(token_ids)

    detokenizer = IncrementalDetokenizer(watch)
    for token_id in TOKENIZER.encode("hello wörld 😀 " * 50):
        detokenizer.push(token_id)
    assert longest <= 8


def test_leading_spaces_of_sentencepiece_decoders_survive() -> None:
    """Such decoders strip the first space of whatever they are given, so no piece may be decoded on its own."""
    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, special_tokens={})
    detokenizer = IncrementalDetokenizer(tokenizer.decode, tokenizer.pieces)
    assert tokenizer.pieces is None
    assert [detokenizer.push(index) for index in (0, 1, 2, 0)] == ["one", " two", " three", " one"]


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
