"""Texts that share a long run of words: how training prompts are kept apart from test prompts."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

NUM_WORDS = 13  # in a row, case and punctuation aside; shorter texts must be equal
TEMPLATE_COUNT = 5  # a run in so many of the others is the task's instruction, not its content
_WORD = re.compile(r"\w+")


def without_overlap(texts: Iterable[str], others: Iterable[str]) -> list[str]:
    """The texts that share no run of 13 words with any of the others; runs that many others share are a template."""
    counts = Counter(run for other in others for run in set(_runs(other)))
    seen = {run for run, count in counts.items() if count < TEMPLATE_COUNT}
    return [text for text in texts if seen.isdisjoint(_runs(text))]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    words = tuple(_WORD.findall(text.lower()))
    for start in range(max(1, len(words) - NUM_WORDS + 1)):
        yield words[start : start + NUM_WORDS]
