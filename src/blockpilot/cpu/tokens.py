"""The tokens of a pass, packed: where their rows go, and what each sees."""

from array import array
from collections.abc import Sequence
from itertools import pairwise

from blockpilot.core.tree import DraftTree
from blockpilot.native.library import MAX_ASKED, BatchData

MAX_SCORES = 1 << 15  # of one run: they shall stay in a processor's own cache


class Tokens:
    """A token sees rows 0 .. `num_placed` of its slot, then the rows of its list."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.positions: list[int] = []
        self.slots: list[int] = []
        self.stored: list[int] = []
        self.num_placed: list[int] = []
        self.num_keys: list[int] = []
        self.list_starts: list[int] = []
        self.lists: list[int] = []
        self._ends: list[int] = []  # of requests

    def __len__(self) -> int:
        return len(self.token_ids)

    def add_chain(self, slot: int, start: int, token_ids: Sequence[int]) -> None:
        """Each sees all before it and itself."""
        count, places = len(token_ids), range(start, start + len(token_ids))
        seen = range(start + 1, start + count + 1)
        self._add(slot, start, token_ids, places)
        self.num_placed += seen
        self.num_keys += seen
        self.list_starts += [0] * count

    def add_block(self, slot: int, start: int, token_ids: Sequence[int], position: int) -> None:
        """Each sees all before the block and the whole block."""
        count = len(token_ids)
        self._add(slot, start, token_ids, range(position, position + count))
        self.num_placed += [start + count] * count
        self.num_keys += [start + count] * count
        self.list_starts += [0] * count

    def add_tree(self, slot: int, start: int, tree: DraftTree) -> None:
        """A node sees the committed rows, then its ancestors and itself, in the order of depth."""
        if tree.is_chain:
            self.add_chain(slot, start, tree.token_ids)
            return
        self._add(slot, start, tree.token_ids, [start + depth for depth in tree.depths])
        self.num_placed += [start] * len(tree)
        paths: list[list[int]] = []
        for node, parent in enumerate(tree.parents):
            path = [*paths[parent], start + node] if node else [start]
            paths.append(path)
            self.num_keys.append(start + len(path))
            self.list_starts.append(len(self.lists))
            self.lists += path

    def _add(self, slot: int, start: int, token_ids: Sequence[int], positions: Sequence[int]) -> None:
        count = len(token_ids)
        self.token_ids += token_ids
        self.positions += positions
        self.slots += [slot] * count
        self.stored += range(start, start + count)
        self._ends.append(len(self.token_ids))

    def describe(self, embedding: int, num_grouped: int, *more: Sequence[int]) -> tuple[BatchData, "Columns"]:
        """For the kernels; `embedding` is where the table lies, `num_grouped` heads share keys.

        Columns, also those of `more`, live as long as what is returned second.
        """
        most = max(self.stored, default=0) + 1
        run_size = max(1, min(MAX_ASKED, MAX_SCORES // max(most, 1)) // num_grouped)
        runs = [start for first, end in pairwise([0, *self._ends]) for start in range(first, end, run_size)]
        columns = Columns(
            *(self.token_ids, self.positions, self.slots, self.stored, self.num_placed, self.num_keys),
            *(self.list_starts, self.lists, [*runs, len(self)], *more),
        )
        ids, positions, slots, stored, placed, keys, starts, lists, run_starts, *_ = columns.addresses
        batch = BatchData(
            len(self), most, len(runs), run_size, run_starts, ids, positions, slots, stored, placed, keys, starts, lists
        )
        batch.embedding = embedding
        return batch, columns


class Columns:
    """Lists of numbers in one array: what the host does between passes is paid with cold caches."""

    def __init__(self, *lists: Sequence[int]) -> None:
        flat: list[int] = []
        starts = []
        for values in lists:
            starts.append(4 * len(flat))
            flat += values
        self.array = array("i", flat or (0,))
        first, _ = self.array.buffer_info()
        self.addresses = [first + start for start in starts]
