import logging
from types import SimpleNamespace

import pytest
import torch

from blockpilot.integrations.vllm.proposer import DraftScores, normalize_keys, repair_key_norm


def make_proposer(**options):
    """As in vLLM: two ways from hidden states to tokens. The hidden states are the logits."""
    proposer = SimpleNamespace(use_local_argmax_reduction=False, use_heterogeneous_vocab=False)
    proposer.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
    proposer._greedy_sample = lambda hidden: hidden.argmax(dim=-1)
    proposer._sample_draft_tokens = lambda hidden, metadata: (proposer._greedy_sample(hidden), None)
    for name, value in options.items():
        setattr(proposer, name, value)
    return proposer


LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 0.0]])


def test_scores_are_log_probabilities_of_the_same_tokens():
    proposer = make_proposer()
    wanted = proposer._sample_draft_tokens(LOGITS, None)[0]
    scores = DraftScores(proposer)
    scores.is_wanted = True
    token_ids, probabilities = proposer._sample_draft_tokens(LOGITS, None)
    assert probabilities is None and torch.equal(token_ids, wanted)
    expected = LOGITS.log_softmax(dim=-1).gather(-1, wanted[:, None])[:, 0]
    torch.testing.assert_close(scores.take(), expected)
    assert scores.take() is None  # taken once


def test_sampled_drafts_bring_their_own_probabilities():
    probabilities = torch.tensor([[0.1, 0.2, 0.7], [1.0, 0.0, 0.0]])
    drawn = torch.tensor([1, 0])
    proposer = make_proposer(_sample_draft_tokens=lambda hidden, metadata: (drawn, probabilities))
    scores = DraftScores(proposer)
    scores.is_wanted = True
    assert proposer._sample_draft_tokens(LOGITS, None) == (drawn, probabilities)
    torch.testing.assert_close(scores.take(), torch.tensor([0.2, 1.0]).log())


@pytest.mark.parametrize("options", [{"use_local_argmax_reduction": True}, {"use_heterogeneous_vocab": True}])
def test_drafters_that_compute_no_logits_are_left_alone(options):
    proposer = make_proposer(**options)
    scores = DraftScores(proposer)
    scores.is_wanted = True
    assert proposer._sample_draft_tokens(LOGITS, None)[0].tolist() == [1, 0]
    assert scores.take() is None


def test_nothing_is_computed_unless_wanted():
    proposer = make_proposer()
    scores = DraftScores(proposer)
    proposer._sample_draft_tokens(LOGITS, None)
    assert scores.take() is None


WEIGHTS = torch.tensor([[1.0, 2.0, 0.5, 1.0], [3.0, 0.1, 1.0, 2.0]])


def make_model(*, is_faulty, dtype=torch.float32):
    weights = WEIGHTS.to(dtype)
    inner = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-6)
    read = weights[:1].expand(2, 4) if is_faulty else weights  # the fault: the first layer's row for all layers
    inner._normalize_context_k = lambda keys: normalize_keys(keys, read, 1e-6)
    return SimpleNamespace(model=inner)


def test_keys_are_normalised_with_the_weight_of_their_layer():
    keys = torch.randn(2, 3, 2, 4)
    for layer in range(2):
        wanted = torch.nn.functional.rms_norm(keys[layer], (4,), WEIGHTS[layer], 1e-6)
        torch.testing.assert_close(normalize_keys(keys, WEIGHTS, 1e-6)[layer], wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_faulty_kernel_is_found_and_replaced(dtype, caplog):
    model = make_model(is_faulty=True, dtype=dtype)
    assert repair_key_norm(model)
    keys = torch.randn(2, 3, 1, 4).to(dtype)
    torch.testing.assert_close(model.model._normalize_context_k(keys), normalize_keys(keys, WEIGHTS.to(dtype), 1e-6))
    assert "repaired" in caplog.text
    assert not repair_key_norm(model)  # once is enough


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sound_kernel_stays(dtype, caplog):
    caplog.set_level(logging.INFO)
    model = make_model(is_faulty=False, dtype=dtype)
    kernel = model.model._normalize_context_k
    assert not repair_key_norm(model) and model.model._normalize_context_k is kernel and not caplog.records


def test_other_drafters_stay():
    assert not repair_key_norm(SimpleNamespace(model=SimpleNamespace()))
