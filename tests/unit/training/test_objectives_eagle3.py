"""EAGLE-3: unrolling in one batch is drafting chain by chain."""

import pytest
import torch

from blockpilot.training.objectives import STEP_DECAY, eagle3_loss
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.text_passes import head_rows, read_taps, unroll
from tests.support import causal_attend
from tests.tiny import VOCAB_SIZE, make_decoder, make_eagle3
from tests.unit.training.pieces import counting_texts

NUM_STEPS = 4


@torch.no_grad()
def chain_logits(model, decoder, ids: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of the chain from row `start` of one text, recomputed from nothing at every step."""
    _, taps = read_taps(decoder, ids[None], model.config.tap_layers)
    hidden = model.fuse(taps)[: start + 1]
    found = []
    for step in range(NUM_STEPS):
        end = start + step + 1
        outputs = model(decoder.embed_tokens(ids[1 : end + 1]), hidden, torch.arange(end), causal_attend)
        found.append(model.logits(outputs[-1]))
        hidden = torch.cat((hidden, outputs[-1:]))
    return torch.stack(found)


def test_unrolling_equals_recomputation() -> None:
    model, decoder = make_eagle3().eval(), make_decoder().eval()
    ids = counting_texts(3).batch(torch.arange(3), 14)[0]
    _, taps = read_taps(decoder, ids, model.config.tap_layers)
    with torch.no_grad():
        steps = unroll(model, decoder, taps, ids, num_steps=NUM_STEPS)
    for row in range(3):
        for start in range(14 - 1 - NUM_STEPS):
            found = torch.stack([steps[step][row, start + step] for step in range(NUM_STEPS)])
            torch.testing.assert_close(found, chain_logits(model, decoder, ids[row], start), rtol=1e-3, atol=1e-3)


def test_loss_counts_answers_only() -> None:
    model, decoder = make_eagle3(draft_vocab_size=61).eval(), make_decoder().eval()
    texts = ResponseSet.from_responses([Response(list(range(1, 13)), 5), Response(list(range(20, 27)), 6)])
    batch = texts.batch(torch.arange(2), 12)
    ids = batch.ids
    _, taps = read_taps(decoder, ids, model.config.tap_layers)
    labels = head_rows(model.draft_token_ids, 61)[ids]
    terms = eagle3_loss(model, decoder, taps, batch, labels=labels, num_steps=2)
    # step 0 of the first text: anchors 5 .. 10 predict 6 .. 11; step 1 one chain less; the second text has no room
    assert terms.weights.tolist() == [6.0, 5.0]
    logits = unroll(model, decoder, taps, ids, num_steps=2)
    for step in range(2):
        picked = torch.log_softmax(logits[step][0, 4 + step : 10], -1).gather(1, labels[0, 6 + step :, None])
        expected = -picked.sum() * STEP_DECAY**step / (1 + STEP_DECAY)
        torch.testing.assert_close(terms.sums[step], expected)


@pytest.mark.parametrize("has_embedding", [False, True])
def test_the_heads_own_embedding_comes_first(has_embedding: bool) -> None:
    model, decoder = make_eagle3(has_embedding=has_embedding).eval(), make_decoder().eval()
    ids = counting_texts(1).batch(torch.arange(1), 6).ids
    _, taps = read_taps(decoder, ids, model.config.tap_layers)
    with torch.no_grad():
        before = unroll(model, decoder, taps, ids, num_steps=1)[0]
        decoder.embed_tokens.weight.zero_()  # taps were read before
        after = unroll(model, decoder, taps, ids, num_steps=1)[0]
    assert torch.equal(before, after) is has_embedding


def test_labels_are_rows_of_the_small_head() -> None:
    model = make_eagle3(draft_vocab_size=7)
    rows = head_rows(model.draft_token_ids, model.config.layers.vocab_size)
    assert rows.shape == (VOCAB_SIZE,) and int((rows >= 0).sum()) == 7
    assert rows[model.draft_token_ids].tolist() == list(range(7))
