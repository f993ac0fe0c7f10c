from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from blockpilot.text.detokenizer import IncrementalDetokenizer
from blockpilot.text.tokenizer import Tokenizer
from tests.support import byte_vocabulary_fields

TOKENIZER = Tokenizer.from_gguf(byte_vocabulary_fields(), "test.gguf")
ALL_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=60)


def stream(ids: Sequence[int]) -> tuple[list[str], IncrementalDetokenizer]:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
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
    detokenizer, returned = IncrementalDetokenizer(TOKENIZER), ""
    for count, token_id in enumerate(ids, start=1):
        returned += detokenizer.push(token_id)
        assert detokenizer.text == TOKENIZER.decode(ids[:count])
        assert detokenizer.text.startswith(returned)
    assert returned + detokenizer.flush() == TOKENIZER.decode(ids)


@given(ALL_IDS)
def test_pieces_that_are_looked_up_are_those_that_decoding_gives(ids: list[int]) -> None:
    decoding, looking = IncrementalDetokenizer(TOKENIZER), IncrementalDetokenizer(TOKENIZER, TOKENIZER.pieces)
    for token_id in ids:
        assert looking.push(token_id) == decoding.push(token_id)
        assert looking.text == decoding.text
    assert looking.flush() == decoding.flush()


def test_whole_characters_are_looked_up_and_parts_of_them_are_decoded() -> None:
    pieces = TOKENIZER.pieces
    assert pieces is not None
    assert [pieces[index] for index in TOKENIZER.encode("aé")] == ["a", "", ""]
    assert pieces[1] == ""  # a special token is skipped

    class Refusing:
        def decode(self, token_ids: Sequence[int], /) -> str:
            raise AssertionError(f"{token_ids} need not be decoded")

    detokenizer = IncrementalDetokenizer(Refusing(), pieces)
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

    class Watched:
        def decode(self, token_ids: Sequence[int], /) -> str:
            nonlocal longest
            longest = max(longest, len(token_ids))
            return TOKENIZER.decode(token_ids)

    detokenizer = IncrementalDetokenizer(Watched())
    for token_id in TOKENIZER.encode("hello wörld 😀 " * 50):
        detokenizer.push(token_id)
    assert longest <= 8


def test_leading_spaces_of_sentencepiece_decoders_survive() -> None:
    """Such decoders strip the first space of whatever they are given, so no piece may be decoded on its own."""
    backend = Backend(models.WordLevel({"▁one": 0, "▁two": 1, "▁three": 2}, unk_token="▁one"))
    backend.decoder = decoders.Metaspace()
    tokenizer = Tokenizer(backend, special_tokens={})
    detokenizer = IncrementalDetokenizer(tokenizer, tokenizer.pieces)
    assert tokenizer.pieces is None
    assert [detokenizer.push(index) for index in (0, 1, 2, 0)] == ["one", " two", " three", " one"]
