"""Where an answer starts to repeat itself. Small models loop, and loops flatter every drafter."""

from collections.abc import Sequence

NGRAM = 16


def find_loop(token_ids: Sequence[int], size: int = NGRAM) -> int:
    """Index of the first token that ends a `size`-gram already seen in the same answer; the length if there is none."""
    flags = loop_flags(token_ids, size)
    return flags.index(True) if True in flags else len(token_ids)


def loop_flags(token_ids: Sequence[int], size: int = NGRAM) -> list[bool]:
    """For every token: does it end a `size`-gram already seen in the same answer?"""
    seen: set[tuple[int, ...]] = set()
    flags = []
    for end in range(1, len(token_ids) + 1):
        gram = tuple(token_ids[max(0, end - size) : end])
        flags.append(len(gram) == size and gram in seen)
        seen.add(gram)
    return flags
