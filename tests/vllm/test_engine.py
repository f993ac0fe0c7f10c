"""In vLLM: the text is the one without speculation, whatever the pilots do; and they do what they say."""

from collections import Counter
from dataclasses import dataclass

import pytest
import torch

from blockpilot import LLM, EngineConfig, SamplingParams
from blockpilot.integrations.vllm.pilot_choice import PilotChoice
from blockpilot.integrations.vllm.plugin import MARK, register
from blockpilot.integrations.vllm.proposer import normalize_keys
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.files import save_pilot
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from tests.vllm.answering import NUM_TOKENS, PROMPTS, ask, make_params, token_ids
from tests.vllm.conftest import NUM_DRAFT_TOKENS

pytestmark = pytest.mark.real_model
VOCAB_SIZE = 49152


@dataclass(frozen=True)
class RaisingPilot(FixedPilot):
    block_size: int = 4
    stage: str = "choose"

    def _fail(self, stage):
        if self.stage == stage:
            raise RuntimeError(f"broken on purpose in {stage}")

    def start(self, prefill, neighbours=()):
        self._fail("start")

    def choose(self, requests):
        self._fail("choose")
        return super().choose(requests)

    def select(self, requests):
        self._fail("select")
        return super().select(requests)


def counts(engine):
    """Our counters, with the number of checked tokens behind the name of the steps."""
    found = Counter()
    for metric in engine.get_metrics():
        if metric.name.startswith("vllm:blockpilot_"):
            name = metric.name.removeprefix("vllm:blockpilot_") + metric.labels.get("draft_tokens", "")
            found[name] += int(metric.value)
    return found


@pytest.mark.parametrize("pilot", ["ar", "fixed:2", "fixed:5", "fixed:16", "chain-step", None])
def test_every_pilot_gives_the_text_without_speculation(engine, plain_answers, pilot):
    assert token_ids(ask(engine, PROMPTS, pilot)) == plain_answers


def test_pilot_folders_run_here(engine, steering, plain_answers, draft_sizes, tmp_path):
    torch.manual_seed(0)
    config = PrefillConfig(input_size=VOCAB_SIZE, sizes=(3, 6), hidden_size=8, inputs="top-k")
    save_pilot(tmp_path, PrefillPilot(PrefillNetwork(config)), target="smollm2-135m", drafter="any", training={})
    steering.load = PilotChoice(str(tmp_path), target="t", drafter="d", costs=StepCosts.linear)
    assert token_ids(ask(engine, PROMPTS)) == plain_answers
    assert set(draft_sizes) <= {0, 2, 5} and max(draft_sizes) >= 2


def test_requests_of_one_batch_keep_their_own_sizes(engine, plain_answers, draft_sizes):
    before = counts(engine)
    overrides = ["fixed:3", "ar", "fixed:6", "chain-step", "fixed:3", "fixed:6"]
    assert token_ids(ask(engine, PROMPTS, overrides)) == plain_answers
    gained = counts(engine) - before
    assert gained["steps2"] > 0 and gained["steps5"] > 0 and gained["steps0"] > 0
    assert max(draft_sizes) > 5  # chain-step's neighbours see its draft, and check their own part of it


def test_a_batch_drafts_no_more_than_its_largest_choice(engine, plain_answers, draft_sizes):
    assert token_ids(ask(engine, PROMPTS, ["fixed:3", "fixed:6", "ar", "fixed:3", "ar", "ar"])) == plain_answers
    assert set(draft_sizes) <= {0, 2, 5} and 5 in draft_sizes


def test_counters_add_up(engine):
    before = counts(engine)
    outputs = ask(engine, PROMPTS, "fixed:6")
    gained = counts(engine) - before
    steps = {size: gained[f"steps{size}"] for size in range(NUM_DRAFT_TOKENS + 1)}
    assert sum(size * count for size, count in steps.items()) == gained["drafted_tokens"]
    assert gained["saved_tokens"] == NUM_DRAFT_TOKENS * sum(steps.values()) - gained["drafted_tokens"]
    summaries = [output.outputs[0].spec_decode_metrics for output in outputs]
    assert gained["drafted_tokens"] == sum(sum(summary.per_step_drafted) for summary in summaries)
    assert gained["accepted_tokens"] == sum(sum(summary.per_step_accepted) for summary in summaries)
    assert steps[0] > 0  # an answer's last token needs no draft


def test_a_prompt_read_in_pieces_takes_part_when_it_is_read(engine, plain_answers, steering, monkeypatch):
    engine.reset_prefix_cache()
    choose, waiting = steering.choose, []

    def note(rows, **options):
        waiting.extend(row.is_waiting for row in rows)
        return choose(rows, **options)

    monkeypatch.setattr(steering, "choose", note)
    assert token_ids(ask(engine, PROMPTS[2:4], "fixed:5")) == plain_answers[2:4]
    assert any(waiting) and not all(waiting)


def test_a_cached_prefix_changes_nothing(engine, plain_answers):
    hits = []
    for _ in range(2):
        assert token_ids(ask(engine, [PROMPTS[3]])) == [plain_answers[3]]
        found = {metric.name: metric.value for metric in engine.get_metrics() if metric.name.endswith("cache_hits")}
        hits.append(found["vllm:prefix_cache_hits"])
    assert hits[1] > hits[0]


def test_an_aborted_request_leaves_the_others_alone(engine, plain_answers, steering):
    inner, answers = engine.llm_engine, {}
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS[:4]]
    prompts = [
        engine.get_tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats
    ]
    for index, prompt in enumerate(prompts):
        inner.add_request(f"abort-{index}", {"prompt_token_ids": prompt}, make_params("fixed:5" if index else None))
    num_steps = 0
    while inner.has_unfinished_requests():
        for output in inner.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)
        num_steps += 1
        if num_steps == 5:
            inner.abort_request(["abort-1"])
    assert [answers[f"abort-{index}"] for index in (0, 2, 3)] == [plain_answers[index] for index in (0, 2, 3)]
    assert len(answers["abort-1"]) < NUM_TOKENS
    ask(engine, [PROMPTS[0]])
    assert len(steering.requests) == 1  # what was remembered of finished and aborted requests is gone


@pytest.mark.parametrize("stage", ["start", "choose", "select"])
def test_a_pilot_that_raises_is_reported_once(engine, steering, plain_answers, draft_sizes, caplog, stage):
    steering.load = lambda override: RaisingPilot(stage=stage)
    assert token_ids(ask(engine, PROMPTS)) == plain_answers
    reports = [record for record in caplog.records if "failed" in record.message]
    assert len(reports) == 1 and f"broken on purpose in {stage}" in reports[0].message
    assert max(draft_sizes) == NUM_DRAFT_TOKENS  # the configured size


def test_registering_again_changes_nothing(engine):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.loggers import PrometheusStatLogger
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    classes = (GPUModelRunner, Scheduler, PrometheusStatLogger)
    hooked = [owner.__init__ for owner in classes]
    assert all(getattr(construct, MARK, None) for construct in hooked)  # by vLLM itself, through the entry point
    register()
    assert [owner.__init__ for owner in classes] == hooked


def test_an_unknown_override_is_reported_and_drafts_as_configured(engine, plain_answers, steering, caplog):
    overrides = ["no-such-pilot", "/etc", "tree:7", None, None, None]
    assert token_ids(ask(engine, PROMPTS, overrides)) == plain_answers
    assert len([record for record in caplog.records if "no-such-pilot" in record.message]) == 1


def test_keys_of_the_context_are_normalised_per_layer(engine, runner):
    ask(engine, [PROMPTS[0]])
    model = runner.drafter.model.model
    keys = torch.randn(len(model._k_norm_weights), 3, 2, model._head_dim)
    wanted = normalize_keys(keys, model._k_norm_weights, model._rms_norm_eps)
    assert not torch.allclose(*model._k_norm_weights[:2])  # else a fault could not be seen
    torch.testing.assert_close(model._normalize_context_k(keys), wanted)


def test_drafts_here_and_there_agree(engine, drafter_folder):
    """Our engine and vLLM accept the same tokens at every step of every prompt, at the same fixed size."""
    size = 8
    config = EngineConfig(dtype="float32", linear_backend="plain")  # what vLLM computes in here
    ours = LLM("smollm2-135m", drafter=str(drafter_folder), pilot=f"fixed:{size}", config=config)
    params = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)  # nothing cuts a step short
    completions = ours.generate(PROMPTS, params)
    outputs = ask(engine, PROMPTS, f"fixed:{size}", ignore_eos=True)
    assert token_ids(outputs) == [completion.token_ids for completion in completions]
    for output, completion in zip(outputs, completions, strict=True):
        drafted = [step for step in completion.steps if step.verify_size > 1]
        steps = output.outputs[0].spec_decode_metrics
        assert steps.per_step_drafted == [step.verify_size - 1 for step in drafted]
        assert steps.per_step_accepted == [step.emitted - 1 for step in drafted]
    assert sum(sum(output.outputs[0].spec_decode_metrics.per_step_accepted) for output in outputs) > 0
