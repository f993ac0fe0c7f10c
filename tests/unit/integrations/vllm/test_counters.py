from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

from blockpilot.integrations.vllm.counters import PilotCounters, PlainSteps, count_sizes


def make_stats(*drafts, num_draft_tokens=3):
    """vLLM's statistics of drafts: (drafted, accepted) each."""
    reached = [sum(drafted > place for drafted, _ in drafts) for place in range(num_draft_tokens)]
    return SimpleNamespace(
        num_drafts=len(drafts),
        num_draft_tokens=sum(drafted for drafted, _ in drafts),
        num_accepted_tokens=sum(accepted for _, accepted in drafts),
        num_draft_tokens_per_pos=reached,
    )


class FakeCounter:
    """Counts like one of prometheus_client: by label values."""

    found: ClassVar[Counter] = Counter()

    def __init__(self, name, documentation, labelnames):
        self.name, self.labelnames, self.key = name, labelnames, None

    def labels(self, *values):
        assert len(values) == len(self.labelnames)
        child = FakeCounter(self.name, "", self.labelnames)
        child.key = (self.name, *values)
        return child

    def inc(self, amount):
        self.found[self.key] += amount


def test_sizes_follow_from_how_far_drafts_reached():
    assert count_sizes(make_stats((0, 0), (1, 0), (3, 2), (3, 3), (2, 0))) == [1, 1, 1, 2]


def test_counters_count_sizes_drafted_accepted_and_saved_tokens(monkeypatch):
    monkeypatch.setattr(FakeCounter, "found", Counter())
    seen = []
    stat_logger = SimpleNamespace(
        per_engine_labelvalues={0: ["model", "0"], 1: ["model", "1"]},
        _counter_cls=FakeCounter,
        spec_decoding_prom=SimpleNamespace(observe=lambda stats, engine_idx: seen.append(engine_idx)),
    )
    PilotCounters(stat_logger, num_draft_tokens=3)
    stat_logger.spec_decoding_prom.observe(make_stats((0, 0), (2, 1), (3, 3)), 1)
    stat_logger.spec_decoding_prom.observe(make_stats((2, 2)), 1)
    assert seen == [1, 1]  # vLLM's own counters go on
    found = {key: count for key, count in FakeCounter.found.items() if count}
    assert found == {
        ("vllm:blockpilot_steps", "model", "1", "0"): 1,
        ("vllm:blockpilot_steps", "model", "1", "2"): 2,
        ("vllm:blockpilot_steps", "model", "1", "3"): 1,
        ("vllm:blockpilot_drafted_tokens", "model", "1"): 7,
        ("vllm:blockpilot_accepted_tokens", "model", "1"): 6,
        ("vllm:blockpilot_saved_tokens", "model", "1"): 5,
    }


def make_scheduler(stats, *, log_stats=True):
    answered = {"first": 0, "plain": 4, "drafted": 4, "reading": 0, "resumed": 2}
    return SimpleNamespace(
        log_stats=log_stats,
        num_spec_tokens=3,
        requests={name: SimpleNamespace(num_output_tokens=count) for name, count in answered.items()},
        update_from_output=lambda scheduled, ran: {0: SimpleNamespace(scheduler_stats=None), 1: stats},
    )


SCHEDULED = SimpleNamespace(scheduled_spec_decode_tokens={"drafted": [5, 6]})
RAN = SimpleNamespace(
    req_ids=["first", "plain", "drafted", "reading", "resumed", "gone"],
    sampled_token_ids=[[1], [2], [3, 4], [], [], [7]],
)


def test_steps_without_a_draft_are_counted_where_vllm_counts_drafts():
    stats = SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=make_stats((2, 1))))
    scheduler = make_scheduler(stats)
    PlainSteps(scheduler, lambda count: make_stats(num_draft_tokens=count))
    scheduler.update_from_output(SCHEDULED, RAN)
    found = stats.scheduler_stats.spec_decoding_stats
    assert (found.num_drafts, found.num_draft_tokens) == (2, 2)  # "plain" alone: others draft, begin or emit nothing


def test_statistics_begin_where_a_step_had_no_draft_at_all():
    stats = SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=None))
    scheduler = make_scheduler(stats)
    PlainSteps(scheduler, lambda count: make_stats(num_draft_tokens=count))
    scheduler.update_from_output(SCHEDULED, RAN)
    assert count_sizes(stats.scheduler_stats.spec_decoding_stats) == [1, 0, 0, 0]


def test_nothing_is_counted_where_vllm_logs_no_statistics():
    stats = SimpleNamespace(scheduler_stats=SimpleNamespace(spec_decoding_stats=None))
    scheduler = make_scheduler(stats, log_stats=False)
    PlainSteps(scheduler, lambda count: make_stats(num_draft_tokens=count))
    scheduler.update_from_output(SCHEDULED, RAN)
    assert stats.scheduler_stats.spec_decoding_stats is None
