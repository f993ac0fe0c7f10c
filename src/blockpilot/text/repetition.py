"""Repetition: where an answer starts to repeat itself, and which texts share a long run of words.

Small models loop, and loops flatter every drafter. Runs of words keep training prompts apart from test prompts.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

_NGRAM = 16
NUM_WORDS = 13  # in a row, case and punctuation aside; shorter texts must be equal
_TEMPLATE_COUNT = 5  # a run in so many of the others is the task's instruction, not its content
_WORD = re.compile(r"\w+")


def find_loop(token_ids: Sequence[int], size: int = _NGRAM) -> int:
    """Index of the first token that ends a `size`-gram already seen in the same answer; the length if there is none."""
    return next((place for place, is_repeat in enumerate(_mark(token_ids, size)) if is_repeat), len(token_ids))


def count_repeats(token_ids: Sequence[int], size: int = _NGRAM) -> int:
    """Tokens that end a `size`-gram already seen in the same answer."""
    return sum(_mark(token_ids, size))


def loop_free_steps(token_ids: Sequence[int], emitted: Sequence[int]) -> list[int]:
    """The emitted lengths of the steps whose anchor stands before the first repetition."""
    anchors, loop = accumulate(emitted, initial=0), find_loop(token_ids)
    return [count for count, anchor in zip(emitted, anchors, strict=False) if anchor < loop]


def _mark(token_ids: Sequence[int], size: int) -> Iterator[bool]:
    """For every token whether it ends a repetition."""
    seen: set[tuple[int, ...]] = set()
    for end in range(1, len(token_ids) + 1):
        gram = tuple(token_ids[max(0, end - size) : end])
        yield len(gram) == size and gram in seen
        seen.add(gram)


def without_overlap(texts: Iterable[str], others: Iterable[str]) -> list[str]:
    """The texts that share no run of 13 words with any of the others; runs that many others share are a template."""
    counts = Counter(run for other in others for run in set(_runs(other)))
    seen = {run for run, count in counts.items() if count < _TEMPLATE_COUNT}
    return [text for text in texts if seen.isdisjoint(_runs(text))]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = tuple(_WORD.findall(text.lower()))
    for start in range(max(1, len(words) - NUM_WORDS + 1)):
        yield words[start : start + NUM_WORDS]
