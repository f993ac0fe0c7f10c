"""Which texts each step of training learns from, as a function of (seed, step) alone.

Texts of about the same length go together, so that little of a batch is padding: there are classes of half the width,
the width, twice the width and so on up to the largest. Every step has about the same number of places and of anchors,
whatever its class: twice the width, half the texts, and twice the anchors in each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from blockpilot.training.distributed import Group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.responses import ResponseSet, TextBatch


class _Class(NamedTuple):
    width: int
    texts: Tensor  # numbers of the texts in it
    batch_size: int  # of all processes together
    blocks: int  # per text

    @property
    def num_batches(self) -> int:
        return max(1, len(self.texts) // self.batch_size)


class Batches:
    def __init__(self, texts: ResponseSet, run: DrafterRun, group: Group) -> None:
        self.texts, self.group, self.seed = texts, group, run.seed
        self.classes = _sort_by_length(texts, run, group)
        self.per_epoch = sum(one.num_batches for one in self.classes)
        self._epoch, self._order = -1, list[tuple[_Class, Tensor]]()

    def at(self, step: int, num_random: int) -> tuple[TextBatch, Tensor]:
        """This process's share of a step: texts, and random numbers, `num_random` for each of a text's blocks."""
        found, indices = self._find(step)
        # drawn on the CPU, so that every device gets the same
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        uniform = torch.rand(found.batch_size, found.blocks * num_random, generator=generator)
        share = slice(self.group.rank, None, self.group.size)
        return self.texts.batch(indices[share], found.width), uniform[share]

    def _find(self, step: int) -> tuple[_Class, Tensor]:
        """The class of a step and its texts, of all processes: epochs are shuffles that depend on the seed alone."""
        epoch, place = divmod(step, self.per_epoch)
        if epoch != self._epoch:
            self._order, self._epoch = self._shuffle(epoch), epoch
        return self._order[place]

    def _shuffle(self, epoch: int) -> list[tuple[_Class, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 7919 + epoch)
        batches = []
        for one in self.classes:
            order = one.texts[torch.randperm(len(one.texts), generator=generator)]
            for number in range(one.num_batches):
                places = torch.arange(number * one.batch_size, (number + 1) * one.batch_size)
                batches.append((one, order[places % len(order)]))  # few texts: some more than once
        return [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]


def _sort_by_length(texts: ResponseSet, run: DrafterRun, group: Group) -> list[_Class]:
    """Classes that have texts. Without a larger width there is one, and longer texts are cut."""
    widths = [run.width]
    if run.max_width:
        widths.insert(0, -(-run.width // 2))
        while widths[-1] < run.max_width:
            widths.append(min(2 * widths[-1], run.max_width))
    place = torch.bucketize(texts.lengths, torch.tensor(widths)).clamp(max=len(widths) - 1)
    found = []
    for index, width in enumerate(widths):
        batch_size = max(1, run.batch_size * run.width // width // group.size) * group.size
        blocks = max(1, run.batch_size * run.blocks // batch_size)
        members = (place == index).nonzero()[:, 0]
        if len(members):
            found.append(_Class(width, members, batch_size, blocks))
    return found
