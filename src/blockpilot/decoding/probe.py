"""Shows that a token's logits are the same bits in every pass, on this machine and with this model.

The reference is plain: one token after the other, each in a pass of its own. Against it stand prompts that are cut into
pieces, chains and trees behind contexts of several lengths, and batches of all that. Tokens are random.
A runner's `first_difference.py` names the operation where a pass leaves the reference.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.errors import InputError
from blockpilot.core.progress import Progress, Report
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.plain_reading import PlainReader, PlainText, first_nodes
from blockpilot.decoding.probe_passes import Difference, FindDifference, Pass, bits
from blockpilot.decoding.target import TargetRunner

CUTS, CHAINS, TREES, BATCHES = KINDS = ("prompt cuts", "chains", "trees", "batches")


@dataclass(frozen=True)
class ProbeSizes:
    """Few, since every shape of a pass is compiled and recorded. They cross the borders that attention knows: chunks of
    64 keys, groups of 256, contexts of 2048."""

    text: int = 2176  # tokens of the long text, where slots have room for them
    starts: Sequence[int] = (1, 60, 250, 2060)  # rows in front of chains and trees
    chains: Sequence[int] = (5, 40)
    trees: Sequence[int] = (9, 40)
    cuts: Sequence[int] = (7, 64, 300, 2176)
    pieces: int = 100  # of one cut, at most
    batches: Sequence[int] = (2, 15)  # requests, the long text not counted
    short_texts: Sequence[int] = (5, 63, 64, 100, 129, 190, 256, 20, 3, 40, 65, 33, 80, 12, 150)
    drafts: Sequence[int] = (40, 5, 16, 1, 9, 3)  # nodes of the requests of a batch


@dataclass
class Counts:
    cases: int = 0
    rows: int = 0
    differing: int = 0


@dataclass(frozen=True)
class ProbeReport:
    kinds: dict[str, Counts]
    seconds: float
    difference: Difference | None  # the first
    num_not_finite: int  # rows of the reference; where all are, equal bits say little

    @property
    def num_cases(self) -> int:
        return sum(counts.cases for counts in self.kinds.values())

    @property
    def num_rows(self) -> int:
        return sum(counts.rows for counts in self.kinds.values())

    @property
    def num_differing(self) -> int:
        return sum(counts.differing for counts in self.kinds.values())

    def to_dict(self) -> dict[str, Any]:
        return {
            "exact": self.difference is None,
            "num_cases": self.num_cases,
            "num_rows": self.num_rows,
            "num_differing": self.num_differing,
            "num_not_finite": self.num_not_finite,
            "seconds": self.seconds,
            "kinds": {kind: asdict(counts) for kind, counts in self.kinds.items()},
            "difference": None if self.difference is None else asdict(self.difference),
        }


def _tell_nobody(what: str, done: int, total: int) -> None:
    pass


def probe(
    runner: TargetRunner,
    find_difference: FindDifference,
    *,
    seed: int = 0,
    report: Report = _tell_nobody,
    sizes: ProbeSizes | None = None,
) -> ProbeReport:
    """Run all cases in free slots. The device must have nothing in flight."""
    sizes, cache = sizes or ProbeSizes(), runner.cache
    if not cache.num_free:
        raise InputError("all slots hold requests: probe before they come or when they have left")
    slots = [cache.reserve() for _ in range(min(cache.num_free, 1 + max(sizes.batches)))]
    try:
        return _Prober(runner, find_difference, slots, sizes, PlainReader(runner, Random(seed)), report).run()
    finally:
        for slot in reversed(slots):
            cache.free(slot)


@dataclass(eq=False)
class _Prober:
    runner: TargetRunner
    find_difference: FindDifference
    slots: list[int]
    sizes: ProbeSizes
    reader: PlainReader
    report: Report
    kinds: dict[str, Counts] = field(default_factory=lambda: {kind: Counts() for kind in KINDS})
    difference: Difference | None = None
    progress: Progress = field(init=False)

    def run(self) -> ProbeReport:
        begun, sizes, others = time.perf_counter(), self.sizes, self.slots[1:]
        length = self._fit(sizes.text)
        starts = [start for start in sizes.starts if start < length]
        cuts = sorted({min(cut, length) for cut in sizes.cuts})
        groups = sorted({min(size, len(others)) for size in sizes.batches if others})
        self.progress = Progress(self.report, len(starts) + 1 + len(cuts) + len(others) + len(groups))
        text = self._probe_drafts(length, starts, cuts)
        self._probe_cuts(text, cuts)
        if others:
            self._probe_batches(text, others, groups)
        return ProbeReport(self.kinds, time.perf_counter() - begun, self.difference, self.reader.num_not_finite)

    def _fit(self, length: int) -> int:
        return min(length, self.runner.cache.capacity - MAX_TREE_NODES)

    def _probe_drafts(self, length: int, starts: Sequence[int], cuts: Sequence[int]) -> PlainText:
        """Read the long text, and check chains and trees on the way."""
        slot, reader = self.slots[0], self.reader
        self.progress.prepare("plain passes")

        def stop() -> None:
            start = self.runner.cache.lengths[slot]
            self._check_first(CHAINS, slot, reader.draw_chain(max(self.sizes.chains)), self.sizes.chains)
            self._check_first(TREES, slot, reader.draw_tree(max(self.sizes.trees)), self.sizes.trees)
            self.progress.advance(f"chains and trees behind {start} tokens")

        ends = {end for cut in cuts for _, end in self._pieces(length, cut)}
        draft = reader.draw_tree(self.sizes.drafts[0])
        text = reader.read_text(slot, length, draft, ends, starts, stop)
        self.progress.advance(f"plain passes of {length} tokens")
        return text

    def _check_first(self, kind: str, slot: int, whole: DraftTree, sizes: Sequence[int]) -> None:
        """The first nodes of one tree, in several sizes."""
        expected = self.reader.read_tree(slot, whole)
        for size in sizes:
            self._check_trees(kind, [(slot, first_nodes(whole, size))], expected[:size])

    def _probe_cuts(self, text: PlainText, cuts: Sequence[int]) -> None:
        slot = self.slots[-1]
        for cut in cuts:
            self.runner.cache.reset(slot)
            for start, end in self._pieces(len(text.token_ids), cut):
                self._check_pieces(CUTS, [(slot, text, start, end)])
            self.progress.advance(f"a prompt in pieces of {cut}")
        self.runner.cache.reset(slot)

    def _pieces(self, length: int, cut: int) -> list[tuple[int, int]]:
        """Where pieces of this size begin and end."""
        return [(start, min(start + cut, length)) for start in range(0, length, cut)][: self.sizes.pieces]

    def _probe_batches(self, long_text: PlainText, others: Sequence[int], groups: Sequence[int]) -> None:
        """Plain steps, mixed drafts and pieces of prompts together. The long text takes part in the largest batch."""
        texts = [self._read_short(index, slot) for index, slot in enumerate(others)]
        batches = [texts[:size] for size in groups]
        for batch in [*batches, [long_text, *texts]]:
            self._check_together(batch, [1] * len(batch))
            if self.runner.can_run(len(batch), max(len(text.draft) for text in batch)):  # in one pass
                self._check_together(batch, [len(text.draft) for text in batch])
        for batch in batches:
            self._read_together(batch)
            self.progress.advance(f"a batch of {len(batch)}")

    def _read_short(self, index: int, slot: int) -> PlainText:
        lengths, drafts = self.sizes.short_texts, self.sizes.drafts
        length = self._fit(lengths[index % len(lengths)] if index < len(lengths) else 2 + index % 7)
        count = drafts[index % len(drafts)]
        draft = self.reader.draw_chain(count) if index % 3 == 1 else self.reader.draw_tree(count)
        ends = {end for piece in self._halves(length) for end in piece}
        text = self.reader.read_text(slot, length, draft, ends)
        self.progress.advance(f"plain passes of {length} tokens")
        return text

    def _halves(self, length: int) -> list[tuple[int, int]]:
        """Two pieces of a short text, if it has two tokens."""
        middle = -(-length // 3)
        return [(0, middle), (middle, length)] if middle < length else [(0, length)]

    def _check_together(self, texts: Sequence[PlainText], sizes: Sequence[int]) -> None:
        sized = list(zip(texts, sizes, strict=True))
        trees = [(text.slot, first_nodes(text.draft, size)) for text, size in sized]
        self._check_trees(BATCHES, trees, torch.cat([text.draft_logits[:size] for text, size in sized]))

    def _read_together(self, texts: Sequence[PlainText]) -> None:
        """All first pieces, then all second ones, from empty slots on."""
        longest = self.runner.longest_piece(len(texts))
        halves = [self._halves(len(text.token_ids)) for text in texts]
        for text in texts:
            self.runner.cache.reset(text.slot)
        for turn in range(2):
            pieces = [(text.slot, text, *own[turn]) for text, own in zip(texts, halves, strict=True) if turn < len(own)]
            fitting = [piece for piece in pieces if piece[3] - piece[2] <= longest]  # in one pass
            if fitting:
                self._check_pieces(BATCHES, fitting)

    def _check_trees(self, kind: str, trees: Sequence[tuple[int, DraftTree]], expected: Tensor) -> None:
        """`expected` [nodes of all trees, V]."""
        done = Pass(trees, [self.runner.cache.lengths[slot] for slot, _ in trees])
        differs = _rows_differ(done.run(self.runner), expected)
        places = [(request, node) for request, (_, tree) in enumerate(trees) for node in range(len(tree))]
        self._note(kind, done, places, differs)

    def _check_pieces(self, kind: str, pieces: Sequence[tuple[int, PlainText, int, int]]) -> None:
        """Pieces (slot, text, start, end) read together: the last token's logits, and all keys and values."""
        trees = [(slot, _as_chain(text.token_ids[start:end])) for slot, text, start, end in pieces]
        done = Pass(trees, [start for _, _, start, _ in pieces], is_prompt=True)
        found = done.run(self.runner)
        differs = _rows_differ(found, torch.stack([text.logits[end] for _, text, _, end in pieces]))
        for row, (slot, text, start, end) in enumerate(pieces):
            stored = self.runner.cache.copy_rows(slot, start, end)
            differs[row] |= not torch.equal(bits(stored), bits(text.rows[..., start:end, :]))
        self._note(kind, done, [(row, len(tree) - 1) for row, (_, tree) in enumerate(trees)], differs)

    def _note(self, kind: str, done: Pass, places: Sequence[tuple[int, int]], differs: Sequence[bool]) -> None:
        """Count rows; those of `places` (request, node) may differ."""
        counts = self.kinds[kind]
        counts.cases += 1
        counts.rows += len(places)
        counts.differing += sum(differs)
        if any(differs) and self.difference is None:
            self.difference = self.find_difference(self.runner, done, *places[list(differs).index(True)])


def _as_chain(token_ids: list[int]) -> DraftTree:
    return DraftTree.chain(token_ids[0], token_ids[1:])


def _rows_differ(found: Tensor, expected: Tensor) -> list[bool]:
    return (bits(found) != bits(expected)).any(dim=1).tolist()
