"""Prometheus metrics: vLLM's names where it has them, ours beside them."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from blockpilot.core.records import Completion, StepRecord, Update
from blockpilot.serving.exchange import Call, Choice
from blockpilot.serving.wire import Load

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96)
_SHORT = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024)
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Metrics:
    def __init__(self, model_name: str) -> None:
        self.registry = registry = CollectorRegistry()
        names, values = ["model_name"], {"model_name": model_name}

        def counter(name: str, about: str) -> Counter:
            return Counter(name, about, names, registry=registry).labels(**values)

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, names, buckets=buckets, registry=registry).labels(**values)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(name, about, names, registry=registry).labels(**values)

        self.running = gauge("vllm:num_requests_running", "requests that are read or answered")
        self.waiting = gauge("vllm:num_requests_waiting", "requests in the queue")
        self.cache_use = gauge("vllm:kv_cache_usage_perc", "share of all slots' positions that are held, from 0 to 1")
        self.prompt_tokens = counter("vllm:prompt_tokens", "tokens of prompts")
        self.cached_tokens = counter("vllm:prefix_cache_hits", "tokens of prompts that were not read again")
        self.generation_tokens = counter("vllm:generation_tokens", "tokens of answers")
        self.first_token = histogram("vllm:time_to_first_token_seconds", "from arrival", _SECONDS)
        self.between = histogram("vllm:inter_token_latency_seconds", "a step's time over its tokens", _SHORT)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "from arrival to the last token", _SECONDS)
        self.drafts = counter("vllm:spec_decode_num_drafts", "steps that drafted")
        self.draft_tokens = counter("vllm:spec_decode_num_draft_tokens", "drafted tokens that were checked")
        self.accepted_tokens = counter("vllm:spec_decode_num_accepted_tokens", "of these, those that were right")
        self.draft_sizes = histogram("blockpilot:draft_size", "block sizes that pilots chose", _SIZES)
        self.checked = histogram("blockpilot:checked_tokens", "tokens of a check, the anchor included", _SIZES)
        self.step_seconds = histogram("blockpilot:step_seconds", "of drafting and checking", _SHORT)
        self.forecast = counter("blockpilot:forecast_tokens", "drafted tokens that pilots expected to be right")
        self.outcome = counter("blockpilot:outcome_tokens", "and those that were, in the same steps")
        self.refused = Counter("blockpilot:refused_calls", "by status", [*names, "status"], registry=registry)
        self.finished = Counter(
            "vllm:request_success", "finished requests", [*names, "finished_reason"], registry=registry
        )
        self.model_name = model_name

    def note(self, call: Call, choice: Choice, update: Update) -> None:
        """An update that has come from the engine."""
        if not choice.has_started:
            self.first_token.observe(time.perf_counter() - call.arrived)
        for step in update.steps:
            self._note_step(step)
        if update.completion is not None:
            self._note_end(call, update.completion)

    def note_refusal(self, status: int) -> None:
        self.refused.labels(self.model_name, status).inc()

    def _note_step(self, step: StepRecord) -> None:
        seconds = step.draft_seconds + step.verify_seconds
        self.step_seconds.observe(seconds)
        self.between.observe(seconds / max(step.emitted, 1))
        self.draft_sizes.observe(step.block_size)
        self.checked.observe(step.verify_size)
        if step.verify_size > 1:
            self.drafts.inc()
            self.draft_tokens.inc(step.verify_size - 1)
            self.accepted_tokens.inc(max(step.emitted - 1, 0))
        if step.promised > 0:
            self.forecast.inc(step.promised)
            self.outcome.inc(max(step.emitted - 1, 0))

    def _note_end(self, call: Call, completion: Completion) -> None:
        self.whole.observe(time.perf_counter() - call.arrived)
        self.prompt_tokens.inc(completion.num_prompt_tokens)
        self.cached_tokens.inc(completion.num_reused_tokens)
        self.generation_tokens.inc(completion.num_tokens)
        self.finished.labels(self.model_name, completion.finish_reason).inc()

    def render(self, load: Load) -> bytes:
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.cache_use.set(load.cache_use)
        return generate_latest(self.registry)
