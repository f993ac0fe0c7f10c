from types import SimpleNamespace

import pytest

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm import profile
from blockpilot.integrations.vllm.profile import ProbePlan, measure_costs, split_times


def cost(size, count, batch_size=1):
    """An engine whose steps take 10 ms, a draft 1 ms and 0.1 per token, a check 0.5 per token; per request."""
    return 10 + batch_size * ((1 + 0.1 * size if size > 1 else 0) + 0.5 * count)


class FakeClock:
    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def monotonic_ns(self):
        self.now += 1e-6
        return int(self.now * 1e9)


class FakeEngine:
    """Reads prompts one after the other, then steps all requests together, as long as `cost` says."""

    def __init__(self, clock, max_model_len=4096):
        self.clock, self.waiting, self.running = clock, [], {}
        limits = SimpleNamespace(max_model_len=max_model_len, get_vocab_size=lambda: 50)
        self.vllm_config = SimpleNamespace(model_config=limits)
        self.asked = []

    def add_request(self, name, prompt, params):
        self.waiting.append((name, params.extra_args["blockpilot"]))
        self.asked.append((params.extra_args["blockpilot"], tuple(prompt["prompt_token_ids"])))

    def has_unfinished_requests(self):
        return bool(self.waiting or self.running)

    def abort_request(self, names):
        for name in names:
            self.running.pop(name)

    def step(self):
        if self.running:
            spec = next(iter(self.running.values()))
            size, count = map(int, spec.split(":")[1:])
            self.clock.now += 1e-3 * cost(size, count, len(self.running))
        if self.waiting:
            name, spec = self.waiting.pop(0)
            self.clock.now += 0.5
            self.running[name] = spec
        return [SimpleNamespace(request_id=name) for name in self.running]


def test_whole_steps_are_taken_apart(monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(profile, "time", clock)
    plan = ProbePlan(num_draft_tokens=7, batch_sizes=(1, 3), context=16, num_rounds=2)
    costs = measure_costs(FakeEngine(clock), SimpleNamespace, plan, {"engine": "fake"})
    assert costs.key == {"engine": "fake", "num_rounds": 2}
    for point in costs.draft:
        assert point.ms == pytest.approx(point.batch_size * (1 + 0.1 * point.tokens))
    for point in costs.verify:
        assert point.ms == pytest.approx(10 + 0.5 * point.batch_size * (point.tokens - 1))
    assert {point.tokens for point in costs.draft} == {4, 8}
    assert {point.tokens for point in costs.verify} == {1, 2, 3, 4, 6, 8}
    assert costs.step_ms(8, 8, batch_size=3, context_length=16) == pytest.approx(cost(8, 7, 3))


def test_a_context_that_leaves_no_room_is_refused():
    with pytest.raises(InputError, match="at most"):
        measure_costs(FakeEngine(FakeClock(), 128), SimpleNamespace, ProbePlan(context=100), {})


def test_noise_makes_no_cost_negative():
    costs = split_times({(1, 0): [10.0], (8, 0): [9.0], (8, 7): [8.5]}, batch_size=1, context=0)
    assert costs.draft_ms(8) == 0 and costs.verify_ms(8, 1, 0) == 10.0
