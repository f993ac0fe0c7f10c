"""The plugin's counters in vLLM's Prometheus endpoint.

vLLM's scheduler counts drafts and sends `SpecDecodingStats` to the front end. How many tokens each position was drafted
for tells how many requests checked how many tokens. Steps that checked none are missing there: they are added in the
scheduler, as drafts of no token, so that vLLM's own acceptance length becomes tokens per step.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

NAMES = {  # what follows `vllm:blockpilot_`
    "steps": "Decoding steps by the number of drafted tokens that they checked.",
    "drafted_tokens": "Drafted tokens that were checked.",
    "accepted_tokens": "Drafted tokens that were accepted.",
    "saved_tokens": "Drafted tokens that the configured size would have checked in addition.",
}


class PlainSteps:
    """Counts decoding steps without a draft in one scheduler."""

    def __init__(self, scheduler: Any, new_stats: Callable[[int], Any]) -> None:
        self.scheduler, self.new_stats = scheduler, new_stats
        self._update: Callable[[Any, Any], Any] = scheduler.update_from_output
        scheduler.update_from_output = self.update_from_output

    def update_from_output(self, scheduler_output: Any, runner_output: Any) -> Any:
        count = self._count(scheduler_output, runner_output) if self.scheduler.log_stats else 0
        outputs = self._update(scheduler_output, runner_output)
        for output in outputs.values():
            stats = output.scheduler_stats
            if stats is not None and count:
                found = stats.spec_decoding_stats or self.new_stats(self.scheduler.num_spec_tokens)
                found.num_drafts += count
                stats.spec_decoding_stats = found
        return outputs

    def _count(self, scheduler_output: Any, runner_output: Any) -> int:
        drafts, requests = scheduler_output.scheduled_spec_decode_tokens, self.scheduler.requests
        emitted = zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=False)
        return sum(
            bool(tokens) and not drafts.get(request_id) and requests[request_id].num_output_tokens > 0
            for request_id, tokens in emitted
            if request_id in requests  # with an answer before this step: the first token comes from prefill
        )


class PilotCounters:
    """Adds our counters wherever vLLM counts drafts for Prometheus."""

    def __init__(self, stat_logger: Any, num_draft_tokens: int) -> None:
        self.num_draft_tokens = num_draft_tokens
        labels, values = ["model_name", "engine"], stat_logger.per_engine_labelvalues
        make = stat_logger._counter_cls
        sizes = make(name="vllm:blockpilot_steps", documentation=NAMES["steps"], labelnames=[*labels, "draft_tokens"])
        self.steps = {
            engine: [sizes.labels(*given, str(size)) for size in range(num_draft_tokens + 1)]
            for engine, given in values.items()
        }
        self.totals = {}
        for name, purpose in NAMES.items():
            if name != "steps":
                counter = make(name=f"vllm:blockpilot_{name}", documentation=purpose, labelnames=labels)
                self.totals[name] = {engine: counter.labels(*given) for engine, given in values.items()}
        self._observe = stat_logger.spec_decoding_prom.observe
        stat_logger.spec_decoding_prom.observe = self.observe

    def observe(self, stats: Any, engine_idx: int = 0) -> None:
        self._observe(stats, engine_idx)
        for counter, count in zip(self.steps[engine_idx], count_sizes(stats), strict=True):
            counter.inc(count)
        drafted = stats.num_draft_tokens
        self.totals["drafted_tokens"][engine_idx].inc(drafted)
        self.totals["accepted_tokens"][engine_idx].inc(stats.num_accepted_tokens)
        self.totals["saved_tokens"][engine_idx].inc(self.num_draft_tokens * stats.num_drafts - drafted)


def count_sizes(stats: Any) -> list[int]:
    """Drafts of 0, 1, ... tokens, from the number of drafts that reached each position."""
    reached = [stats.num_drafts, *stats.num_draft_tokens_per_pos, 0]
    return [here - beyond for here, beyond in pairwise(reached)]
