from types import SimpleNamespace

import pytest
import torch

from blockpilot.integrations.vllm.draft_scores import DraftScores


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
