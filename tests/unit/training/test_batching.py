"""Which texts a step learns from: every text once an epoch, texts of similar length together."""

from collections import Counter

import pytest
import torch

from blockpilot.training.batching import Batches
from blockpilot.training.distributed import Group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.responses import Response, ResponseSet

LENGTHS = [4, 5, 6, 7, 8, 12, 14, 15, 16, 17, 24, 30, 32, 33, 40, 60]


def make_texts(lengths: list[int]) -> ResponseSet:
    return ResponseSet.from_responses(Response([100 + place] * length, 2) for place, length in enumerate(lengths))


def make(texts: ResponseSet | None = None, group: Group | None = None, **options: int) -> Batches:
    settings = {"batch_size": 4, "width": 16, "blocks": 8} | options
    return Batches(make_texts(LENGTHS) if texts is None else texts, DrafterRun(**settings), group or Group())


def shown(batches: Batches, step: int) -> list[int]:
    return [int(row[0]) - 100 for row in batches.at(step, 2)[0].ids]


def test_the_order_is_a_function_of_the_seed() -> None:
    one, same, other = (make(seed=seed) for seed in (1, 1, 2))
    steps = range(2 * one.per_epoch)
    orders = [[shown(batches, step) for step in steps] for batches in (one, same, other)]
    assert orders[0] == orders[1] != orders[2]
    for epoch in (orders[0][: one.per_epoch], orders[0][one.per_epoch :]):
        assert sorted(text for batch in epoch for text in batch) == list(range(16)), "an epoch shows every text once"
    assert orders[0][: one.per_epoch] != orders[0][one.per_epoch :]
    assert [shown(one, step) for step in reversed(steps)] == orders[0][::-1]
    assert torch.equal(one.at(3, 2)[1], same.at(3, 2)[1])
    assert not torch.equal(one.at(3, 2)[1], one.at(2, 2)[1])


def test_without_a_larger_width_texts_are_cut() -> None:
    batches = make()
    assert {one.width for one in batches.classes} == {16}
    texts, uniform = batches.at(0, 2)
    assert texts.ids.shape == (4, 16) and int(texts.lengths.max()) <= 16
    assert uniform.shape == (4, 16)
    assert batches.at(0, 0)[1].shape == (4, 0)


def test_texts_of_similar_length_go_together() -> None:
    batches = make(max_width=48)
    assert [(one.width, one.batch_size, one.blocks) for one in batches.classes] == [
        (8, 8, 4), (16, 4, 8), (32, 2, 16), (48, 1, 32)
    ]  # fmt: skip
    counts: Counter[int] = Counter()
    for step in range(batches.per_epoch):
        texts, uniform = batches.at(step, 2)
        width = texts.ids.shape[1]
        assert len(texts.ids) * width == 64 or width == 48
        assert uniform.shape == (len(texts.ids), 2 * 32 // len(texts.ids))
        for row, length in zip(texts.ids, texts.lengths, strict=True):
            text = int(row[0]) - 100
            counts[text] += 1
            assert int(length) == min(LENGTHS[text], 48)
            assert width == 48 or width // 2 < LENGTHS[text] <= width or width == 8
    assert set(counts) == set(range(16))


def test_processes_share_a_step() -> None:
    whole, parts = make(max_width=48, batch_size=8), [
        make(max_width=48, batch_size=8, group=Group(rank, 2)) for rank in range(2)
    ]  # fmt: skip
    for step in range(whole.per_epoch):
        texts, uniform = whole.at(step, 2)
        shares = [part.at(step, 2) for part in parts]
        assert torch.stack([share[0].ids for share in shares], 1).flatten(0, 1).equal(texts.ids)
        assert torch.stack([share[1] for share in shares], 1).flatten(0, 1).equal(uniform)


@pytest.mark.parametrize("max_width", [0, 32])
def test_fewer_texts_than_a_batch_repeat(max_width: int) -> None:
    batches = make(make_texts([12, 13, 14]), batch_size=60, max_width=max_width)
    assert batches.per_epoch == 1
    assert Counter(shown(batches, 0)) == {0: 20, 1: 20, 2: 20}
