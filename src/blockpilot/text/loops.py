"""Where an answer starts to repeat itself. Small models loop, and loops flatter every drafter."""

from collections.abc import Iterator, Sequence

NGRAM = 16


def find_loop(token_ids: Sequence[int], size: int = NGRAM) -> int:
    """Index of the first token that ends a `size`-gram already seen in the same answer; the length if there is none."""
    return next((place for place, is_repeat in enumerate(_mark(token_ids, size)) if is_repeat), len(token_ids))


def count_repeats(token_ids: Sequence[int], size: int = NGRAM) -> int:
    """Tokens that end a `size`-gram already seen in the same answer."""
    return sum(_mark(token_ids, size))


def _mark(token_ids: Sequence[int], size: int) -> Iterator[bool]:
    """For every token whether it ends a repetition."""
    seen: set[tuple[int, ...]] = set()
    for end in range(1, len(token_ids) + 1):
        gram = tuple(token_ids[max(0, end - size) : end])
        yield len(gram) == size and gram in seen
        seen.add(gram)
