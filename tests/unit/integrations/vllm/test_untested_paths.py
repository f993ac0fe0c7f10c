"""The V2 runner and asynchronous scheduling have not been run in vLLM; here is what can be checked without it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.async_sizes import AsyncSizes
from blockpilot.integrations.vllm.pilot_choice import PilotChoice
from blockpilot.integrations.vllm.runner_v2 import PilotedRunnerV2
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.pilots.step import StepPilot
from tests.unit.integrations.vllm.pieces import NUM_DRAFT_TOKENS, make_steering


def make_params(**extra):
    return SimpleNamespace(max_tokens=30, temperature=0.0, extra_args=extra or None)


class FakeRunnerV2:
    """Two requests in slots 1 and 0; tokens stay on the device, the scheduler hears of their number only."""

    def __init__(self, confidence=0.9):
        self.max_num_reqs, self.max_model_len, self.device = 2, 64, torch.device("cpu")
        lengths = SimpleNamespace(np=np.array([8, 8]))
        self.req_states = SimpleNamespace(
            req_id_to_index={"a": 1, "b": 0}, prompt_len=lengths, max_seq_len=np.array([38, 38])
        )
        probabilities = torch.full((2 * NUM_DRAFT_TOKENS, 4), (1 - confidence) / 3)
        probabilities[:, 1] = confidence
        self.speculator = SimpleNamespace(
            compute_draft_logits=lambda hidden: probabilities.log(), propose=self._propose
        )
        self.add_requests = lambda output: None

    def _propose(self, *given, **options):
        self.speculator.compute_draft_logits(None)
        return torch.ones(2, NUM_DRAFT_TOKENS, dtype=torch.int64)

    def take_draft_token_ids(self):
        return SimpleNamespace(req_ids=["a", "b"], draft_token_ids=[[-1] * NUM_DRAFT_TOKENS for _ in range(2)])

    def step(self, *num_sampled, **options):
        batch = SimpleNamespace(num_reqs=2, req_ids=["a", "b"])
        sampled = torch.tensor(num_sampled)
        self.speculator.propose(batch, None, None, torch.zeros(2, 3), None, sampled, "last", **options)
        return [len(token_ids) for token_ids in self.take_draft_token_ids().draft_token_ids]


def add_requests(runner, **params):
    new = [SimpleNamespace(req_id=name, sampling_params=given) for name, given in params.items()]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new))


def test_v2_reports_shorter_drafts():
    runner = FakeRunnerV2()
    PilotedRunnerV2(runner, make_steering(FixedPilot(4), small=FixedPilot(2)))
    add_requests(runner, a=make_params(), b=make_params(blockpilot="small"))
    assert runner.step(1, 1) == [3, 1]
    assert runner.step(3, 0) == [3, 0]  # b is still reading its prompt


def test_v2_scores_reach_the_pilot():
    pilot = StepPilot(Calibration.identity(), StepCosts.linear(slope=0.1), is_chain=True, draft_sizes=(8,))
    lengths = []
    for confidence in (0.6, 0.99):
        runner = FakeRunnerV2(confidence)
        PilotedRunnerV2(runner, make_steering(pilot))
        add_requests(runner, a=make_params(), b=make_params())
        lengths.append(runner.step(1, 1)[0])
    assert 0 < lengths[0] < lengths[1] == 7


def test_v2_counts_answers_and_forgets_requests():
    runner = FakeRunnerV2()
    piloted = PilotedRunnerV2(runner, make_steering(FixedPilot(8)))
    add_requests(runner, a=make_params(), b=make_params())
    assert runner.step(28, 1) == [1, 7]  # a may gain two more tokens: the last comes for free
    runner.req_states.req_id_to_index = {"b": 0}
    with pytest.raises(KeyError):
        piloted._row("a", 1)
    assert runner.step(1, 1, dummy_run=True) == [1, 7]  # nothing is decided in a dummy run


def test_v2_turns_itself_off_when_it_fails(caplog):
    runner = FakeRunnerV2()
    PilotedRunnerV2(runner, make_steering(FixedPilot(4)))
    assert runner.step(1, 1) == [7, 7]  # requests it was never told of
    assert "stays off" in caplog.text


def make_scheduler(**overrides):
    requests = {
        name: SimpleNamespace(
            is_prefill_chunk=False, sampling_params=make_params(**({"blockpilot": spec} if spec else {}))
        )
        for name, spec in overrides.items()
    }

    def update(output):
        for name in output.num_scheduled_tokens:
            requests[name].spec_token_ids = [-1] * NUM_DRAFT_TOKENS

    return SimpleNamespace(requests=requests, _update_after_schedule=update)


def make_choice(spec):
    return PilotChoice(spec, target="t", drafter="d", costs=StepCosts.linear)


def test_asynchronous_requests_get_placeholders_of_their_own_size(caplog):
    scheduler = make_scheduler(a=None, b="fixed:2", c="ar", d="chain-step")
    scheduler.requests["e"] = SimpleNamespace(is_prefill_chunk=True, sampling_params=None)
    AsyncSizes(scheduler, make_choice("fixed:4"))
    for _ in range(2):
        scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens=dict.fromkeys("abcde", 1)))
    lengths = {name: len(request.spec_token_ids) for name, request in scheduler.requests.items()}
    assert lengths == {"a": 3, "b": 1, "c": 0, "d": 3, "e": NUM_DRAFT_TOKENS}
    assert len(caplog.records) == 1 and "chain-step" in caplog.text


def test_asynchronous_scheduling_refuses_pilots_that_decide_after_the_draft():
    with pytest.raises(InputError, match="--no-async-scheduling"):
        AsyncSizes(make_scheduler(), make_choice("chain-step"))
