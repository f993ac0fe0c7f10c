"""Where an answer starts to repeat itself. Small models loop, and loops flatter every drafter."""

from collections.abc import Sequence

NGRAM = 16


def find_loop(token_ids: Sequence[int], size: int = NGRAM) -> int:
    """Index of the first token that ends a `size`-gram already seen in the same answer; the length if there is none."""
    seen: set[tuple[int, ...]] = set()
    for end in range(size, len(token_ids) + 1):
        gram = tuple(token_ids[end - size : end])
        if gram in seen:
            return end - 1
        seen.add(gram)
    return len(token_ids)
