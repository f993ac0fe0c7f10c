"""The weights of the loss, and that a drafter learns from it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot.models.dflash import DFlash
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.drafters import initialise
from blockpilot.training.evaluation import evaluate_drafter
from blockpilot.training.objectives import pace_weights, position_weights
from blockpilot.training.text_passes import draft_hidden, make_blocks, mixed_precision, read_taps
from tests.unit.training.pieces import WIDTH, counting_texts, cycling_texts, make_objective, make_trainer


def test_d_pace_without_floor_is_the_gradient_of_the_expected_length() -> None:
    losses = torch.rand(3, 2, 7, dtype=torch.float64).mul(2).requires_grad_()
    expected = sum(torch.exp(-losses[..., : k + 1]).prod(-1) for k in range(7))
    expected.sum().backward()
    weights = pace_weights(losses, torch.ones_like(losses, dtype=torch.bool), floor=0)
    torch.testing.assert_close(weights, -losses.grad)
    assert not weights.requires_grad


def test_d_pace_floor_and_unknown_labels() -> None:
    losses, is_known = torch.rand(5), torch.tensor([True, True, False, True, True])
    a, q = 0.3, torch.exp(-losses)
    kept = (1 - a) * q + a
    weights = pace_weights(losses, is_known, floor=a)
    expected = [kept[0] + kept[0] * kept[1], kept[0] * kept[1], 0, 0, 0]  # no chain passes an unknown token
    torch.testing.assert_close(weights, torch.tensor([float(x) for x in expected]))


def test_exponential_weights() -> None:
    weights = position_weights(torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool), DrafterRun(gamma=2.0))
    torch.testing.assert_close(weights, torch.tensor([1.0, 0.6065307, 0.3678794]).expand(2, 3))


def test_mixed_precision_where_weights_are_not_in_full() -> None:
    decoder = make_objective().decoder
    with mixed_precision(decoder):
        assert not torch.is_autocast_enabled("cpu")
    with mixed_precision(decoder.to(torch.bfloat16)):
        assert torch.is_autocast_enabled("cpu")


def test_the_hidden_tail_of_a_short_block_changes_nothing() -> None:
    objective = make_objective(is_second=True)
    texts = counting_texts(2).batch(torch.arange(2), WIDTH)
    _, taps = read_taps(objective.decoder, texts.ids, objective.model.config.tap_layers)
    anchors = torch.tensor([[6, 20], [9, 30]])

    def hidden(full_size: int) -> torch.Tensor:
        blocks = make_blocks(texts, anchors=anchors, sizes=torch.full_like(anchors, 4), full_size=full_size)
        with torch.no_grad():
            return draft_hidden(objective.model, objective.decoder, taps, blocks)

    torch.testing.assert_close(hidden(8)[:, :, :4], hidden(4), rtol=1e-4, atol=1e-5)


def test_labels_from_the_targets_argmax() -> None:
    objective = make_objective()
    objective.run = replace(objective.run, labels="argmax")
    texts = counting_texts(2).batch(torch.arange(2), WIDTH)
    ids = texts.ids
    hidden, _ = read_taps(objective.decoder, ids, (0,))
    said = objective.decoder.logits(hidden).argmax(-1).view(ids.shape)
    anchors = torch.tensor([[6], [9]])
    blocks = make_blocks(texts, anchors=anchors, sizes=torch.full_like(anchors, 8), full_size=8)
    assert objective._labels(ids, hidden, blocks)[0, 0].tolist() == said[0, 6:13].tolist()


@pytest.mark.parametrize("is_second", [False, True])
def test_a_tiny_drafter_learns(tmp_path: Path, is_second: bool) -> None:
    objective, data, rows = make_objective(is_second=is_second), cycling_texts(), []
    objective.model = DFlash(objective.model.config)
    initialise(objective.model)

    def tau() -> float:
        return evaluate_drafter(objective.model, objective.decoder, data, block_size=8, width=WIDTH).tau_mean

    before = tau()
    make_trainer(tmp_path, objective, data, steps=60, learning_rate=1e-2).run(rows.append)
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.3 * losses[0]
    assert tau() > before + 1
