"""Where blocks stand and what they see."""

import torch

from blockpilot.training.responses import TextBatch
from blockpilot.training.text_passes import block_mask, make_blocks, sample_blocks
from tests.unit.training.pieces import counting_texts

LENGTHS, PROMPTS = torch.tensor([20, 9, 40]), torch.tensor([4, 7, 39])


def sampled(seed: int = 0, min_size: int = 3):
    ids = torch.arange(120).view(3, 40)
    uniform = torch.rand(3, 200, 2, generator=torch.Generator().manual_seed(seed))
    return ids, sample_blocks(TextBatch(ids, LENGTHS, PROMPTS), uniform=uniform, full_size=6, min_size=min_size)


def test_anchors_lie_inside_answers_and_reach_every_place() -> None:
    _, blocks = sampled()
    assert [sorted(set(row.tolist())) for row in blocks.anchors] == [list(range(4, 19)), [7], [39]]
    assert sorted(set(blocks.sizes.flatten().tolist())) == [3, 4, 5, 6]


def test_labels_are_the_text_behind_the_anchor() -> None:
    ids, blocks = sampled()
    for row, length in enumerate(LENGTHS.tolist()):
        for index in range(blocks.anchors.shape[1]):
            anchor, size = int(blocks.anchors[row, index]), int(blocks.sizes[row, index])
            expected = ids[row, anchor + 1 : min(anchor + size, length)].tolist()
            is_valid = blocks.is_valid[row, index]
            assert blocks.labels[row, index][is_valid].tolist() == expected
            assert is_valid.tolist() == [place < len(expected) for place in range(5)]


def test_extreme_numbers_stay_inside() -> None:
    texts = counting_texts(2).batch(torch.arange(2), 40)
    uniform = torch.tensor([0.0, 1 - 2**-24]).view(1, 2, 1).expand(2, 2, 2)
    blocks = sample_blocks(texts, uniform=uniform, full_size=8, min_size=2)
    assert blocks.anchors.tolist() == [[4, 38], [4, 38]]
    assert blocks.sizes.tolist() == [[2, 8], [2, 8]]


def test_mask_shows_the_context_before_and_the_own_visible_block() -> None:
    texts = TextBatch(torch.arange(12)[None], torch.tensor([12]), torch.tensor([0]))
    full, anchors, sizes = 4, [5, 5, 0], [4, 2, 3]
    blocks = make_blocks(texts, anchors=torch.tensor([anchors]), sizes=torch.tensor([sizes]), full_size=full)
    mask = block_mask(blocks, width=12)[0]
    assert mask.shape == (12, 24)
    for query in range(12):
        owner = query // full
        seen = set(range(anchors[owner]))
        seen |= {12 + owner * full + offset for offset in range(sizes[owner])}
        seen.add(12 + query)  # a hidden query sees itself: attention over nothing is no number
        assert set(mask[query].nonzero().flatten().tolist()) == seen
