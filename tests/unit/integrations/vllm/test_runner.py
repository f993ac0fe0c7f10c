from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blockpilot.integrations.vllm.runner import PilotedRunner, last_row
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from blockpilot.pilots.step import StepPilot
from tests.unit.integrations.vllm.pieces import NUM_DRAFT_TOKENS, make_steering

VOCAB_SIZE = 5
OTHERS = ("metadata", torch.zeros(4, 3), torch.zeros(4, VOCAB_SIZE), None, None, "attention", "slots")


@dataclass
class FakeOutput:
    num_spec_tokens_to_schedule: int = NUM_DRAFT_TOKENS
    req_ids: list = field(default_factory=list)


class FakeRunner:
    """vLLM's runner with two requests: it drafts token 10, 11, ... and is as sure of them as `confidence` says."""

    def __init__(self, confidence=0.9):
        self.confidence = confidence
        self.max_model_len = 64
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.discard_request_mask = SimpleNamespace(np=np.zeros(8, dtype=bool))
        self.model = SimpleNamespace(compute_logits=lambda hidden: hidden)
        self.drafter = SimpleNamespace(model=SimpleNamespace(compute_logits=self.draft_logits))
        self.drafter.use_local_argmax_reduction = self.drafter.use_heterogeneous_vocab = False
        self.drafter._greedy_sample = lambda hidden: self.draft_logits(hidden).argmax(dim=-1)
        self.drafter._sample_draft_tokens = lambda hidden, metadata: (self.drafter._greedy_sample(hidden), None)
        self.requests = {name: make_request() for name in "ab"}
        self.counts = []

    def draft_logits(self, hidden):
        rest = (1 - self.confidence) / 31
        probabilities = torch.full((len(hidden), 32), rest)
        probabilities[torch.arange(len(hidden)), hidden] = self.confidence
        return probabilities.log()

    def propose_draft_token_ids(self, output, sampled, *others):
        count, num_rows = output.num_spec_tokens_to_schedule, len(self.input_batch.req_ids)
        self.counts.append(count)
        assert others[0] == "metadata" and others[-1] == "slots"
        if not count:
            return torch.empty(num_rows, 0, dtype=torch.int64)
        wanted = (10 + torch.arange(count)).repeat(num_rows)
        return self.drafter._sample_draft_tokens(wanted, None)[0].view(num_rows, count)


def make_request(**extra):
    params = SimpleNamespace(max_tokens=30, temperature=0.0, extra_args=extra or None)
    return SimpleNamespace(sampling_params=params, num_prompt_tokens=8, output_token_ids=[])


SAMPLED = torch.tensor([[3, -1, -1], [4, -1, -1]])


def test_choices_go_to_the_drafter_and_drafts_come_back_trimmed():
    runner = FakeRunner()
    runner.requests["b"] = make_request(blockpilot="small")
    PilotedRunner(runner, make_steering(FixedPilot(4), small=FixedPilot(2)))
    output = FakeOutput()
    assert runner.propose_draft_token_ids(output, SAMPLED, *OTHERS) == [[10, 11, 12], [10]]
    assert runner.counts == [3]
    assert output.num_spec_tokens_to_schedule == NUM_DRAFT_TOKENS  # vLLM's own object is not changed


def test_scores_of_the_draft_reach_the_pilot():
    pilot = StepPilot(Calibration.identity(), StepCosts.linear(slope=0.1), is_chain=True, draft_sizes=(8,))
    lengths = {}
    for confidence in (0.6, 0.99):
        runner = FakeRunner(confidence)
        PilotedRunner(runner, make_steering(pilot))
        lengths[confidence] = len(runner.propose_draft_token_ids(FakeOutput(), SAMPLED, *OTHERS)[0])
    assert 0 < lengths[0.6] < lengths[0.99] == 7


def test_emitted_tokens_and_remaining_ones_are_told():
    runner = FakeRunner()
    piloted = PilotedRunner(runner, make_steering())
    runner.requests["a"].output_token_ids = [1, 2]
    runner.discard_request_mask.np[1] = True
    first, second = piloted._rows(torch.tensor([[3, 4, -1], [9, -1, -1]]))
    assert (first.num_answer_tokens, first.num_emitted, first.max_answer_tokens) == (4, 2, 30)
    assert second.is_waiting and second.num_emitted == 0
    late = piloted._rows([[3, 4], []])[0]  # after vLLM's book-keeping: counted already
    assert (late.num_answer_tokens, late.num_emitted) == (2, 2)
    runner.max_model_len = 20
    assert piloted._rows(SAMPLED)[0].max_answer_tokens == 12


def test_prefill_pilots_see_the_last_position_of_their_own_request():
    network = PrefillNetwork(PrefillConfig(input_size=VOCAB_SIZE, sizes=(2, 5), hidden_size=4))
    for parameter in network.parameters():
        torch.nn.init.zeros_(parameter)
    network.head.bias.data[1] = 1.0
    runner = FakeRunner()
    seen = []
    network.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    PilotedRunner(runner, make_steering(PrefillPilot(network)))
    hidden = torch.randn(5, VOCAB_SIZE)
    metadata = SimpleNamespace(num_draft_tokens=[2, 1])
    given = ("metadata", torch.zeros(5, 3), hidden, None, metadata, "attention", "slots")
    assert [len(kept) for kept in runner.propose_draft_token_ids(FakeOutput(), SAMPLED, *given)] == [4, 4]
    torch.testing.assert_close(torch.cat(seen), hidden[[2, 4]].softmax(dim=-1))
    assert [last_row(index, None) for index in range(2)] == [0, 1]


@pytest.mark.parametrize("place", ["choose", "select"])
def test_a_failure_of_ours_turns_the_plugin_off(place, caplog, monkeypatch):
    runner = FakeRunner()
    steering = make_steering(FixedPilot(4))
    PilotedRunner(runner, steering)
    monkeypatch.setattr(steering, place, lambda *args, **options: 1 / 0)
    for _ in range(2):
        drafted = runner.propose_draft_token_ids(FakeOutput(), SAMPLED, *OTHERS)
        assert isinstance(drafted, torch.Tensor)
    assert runner.counts[1] == NUM_DRAFT_TOKENS and drafted.shape == (2, NUM_DRAFT_TOKENS)
    assert len(caplog.records) == 1 and "stays off" in caplog.text
