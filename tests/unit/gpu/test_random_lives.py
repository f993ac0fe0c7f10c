"""Random lives of an engine whose device is late by random amounts, and at times fails. Reference kernels."""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from blockpilot import load_pilot
from blockpilot.core.records import Completion, Update
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from blockpilot.engine.sequence import Sequence
from blockpilot.gpu.device import Stopwatch
from blockpilot.gpu.step import DeviceExecutor
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.calibration import Calibration
from blockpilot.pilots.cost_model import StepCosts
from blockpilot.pilots.step import StepPilot
from tests.tiny import make_llm
from tests.unit.gpu.late_device import LateDevice
from tests.unit.gpu.test_passes import PROMPTS
from tests.unit.gpu.test_step import CHEAP, build

CONTEXT = 100
DEAR = StepCosts.linear(draft=0.5, slope=0.4)
CROWDS = (["ar"], ["fixed:4"], ["tree:15"], ["tree:40"], ["cheap"], ["dear"], ["fixed:8", "tree:15"], ["cheap", "ar"])
FRAGILE = [(DeviceExecutor, name) for name in ("begin", "follow", "land")]
FRAGILE += [(Stopwatch, "mark"), (Stopwatch, "wait"), (Sequence, "take"), (GpuTargetRunner, "_check")]  # type: ignore[list-item]


class LostError(Exception):
    """What a device that fails raises here."""


@cache
def plain_answer(prompt: str, params: SamplingParams) -> Completion:
    return _plain().generate(prompt, params, pilot="ar", is_raw=True)


@cache
def _plain() -> LLM:
    return make_llm("qwen3", context_length=CONTEXT)


class Life:
    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random, self.is_armed = random.Random(seed), False
        self.late = LateDevice()
        self.late.use(monkeypatch)
        for owner, name in FRAGILE:
            monkeypatch.setattr(owner, name, self._around(getattr(owner, name)))
        self.num_slots = self.random.choice([1, 2, 4, 8])
        self.llm = build(num_slots=self.num_slots, context_length=CONTEXT, costs=CHEAP)
        self.engine = self.llm.engine
        own = {"cheap": StepPilot(Calibration.identity(), CHEAP), "dear": StepPilot(Calibration.identity(), DEAR)}
        self.pilots: list[Pilot] = [own.get(name) or load_pilot(name) for name in self.random.choice(CROWDS)]
        self.open: dict[int, tuple[Completion, list[str]]] = {}  # what each request shall answer, and what it has told
        self.num_told = 0

    def _around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def act(*given: Any, **options: Any) -> Any:
            self._disturb()
            found = run(*given, **options)
            self._disturb()
            return found

        return act

    def _disturb(self) -> None:
        if self.random.random() < 0.3:
            self.late.work(self.late.num_done + self.random.randrange(4))
        if self.is_armed and self.random.random() < 0.08:
            self.is_armed = False
            raise LostError

    def ask(self) -> None:
        prompt, chance = self.random.choice(PROMPTS), self.random.random
        params = SamplingParams(max_new_tokens=self.random.choice([1, 2, 3, 7, 20, 40, 200]), ignore_eos=chance() < 0.7)
        if chance() < 0.2:
            params = replace(params, temperature=0.7, seed=self.random.randrange(3))
        answer = plain_answer(prompt, params)
        if chance() < 0.4:
            params = replace(params, stop_token_ids=(self.random.choice(answer.token_ids),))
        elif chance() < 0.2 and len(answer.text) > 2:
            place = self.random.randrange(len(answer.text) - 1)
            params = replace(params, stop=(answer.text[place : place + 2],))
        request = self.engine.add_request(self.llm.tokenizer.encode(prompt), params, self.random.choice(self.pilots))
        self.open[request] = plain_answer(prompt, params), []

    def abort(self) -> None:
        request = self.random.choice(list(self.open))
        expected, _ = self.open.pop(request)
        found = self.engine.abort(request)
        assert found is not None and found.token_ids == expected.token_ids[: len(found.token_ids)]

    def step(self, *, may_fail: bool) -> None:
        self.is_armed = may_fail and self.random.random() < 0.15
        try:
            self.read(self.engine.step())
        except LostError:
            self.read(self.engine.take_updates())
            self.open = {one: self.open[one] for one in self.open if self.engine.scheduler.find(one) is not None}
        self.is_armed = False

    def read(self, news: list[Update]) -> None:
        for update in news:
            if update.request_id not in self.open:
                continue  # it has been aborted
            expected, texts = self.open[update.request_id]
            texts.append(update.new_text)
            found = update.completion
            if found is not None:
                del self.open[update.request_id]
                self.num_told += 1
                assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
                assert ("".join(texts), found.finish_reason) == (expected.text, expected.finish_reason)
                assert sum(step.emitted for step in found.steps) + 1 == len(found.token_ids)

    def check(self) -> None:
        """Slots and lengths are those of the requests inside."""
        scheduler, target, drafter = self.engine.scheduler, self.engine.runner.cache, self.engine.drafter
        inside = scheduler.prefilling + scheduler.decoding
        assert target.num_free == self.num_slots - len(inside)
        for sequence in scheduler.decoding:
            if sequence.is_active:
                assert target.lengths[sequence.slot] == sequence.anchor_position
                if sequence.pilot.num_candidates:
                    assert drafter.cache.lengths[sequence.slot] == sequence.anchor_position  # type: ignore[union-attr]


@pytest.mark.parametrize("may_fail", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_every_answer_is_the_plain_one_and_nothing_leaks(
    monkeypatch: pytest.MonkeyPatch, seed: int, may_fail: bool
) -> None:
    life = Life(seed, monkeypatch)
    for _ in range(60):
        chance = life.random.random()
        if chance < 0.18 and len(life.open) < life.num_slots + 3:
            life.ask()
        elif chance < 0.22 and life.open:
            life.abort()
        elif chance < 0.26:
            life.engine.settle()
        elif chance < 0.27:
            life.llm.prepare(life.random.choice([1, 2]))
        else:
            life.step(may_fail=may_fail)
        life.check()
    for _ in range(300):
        if life.engine.has_work:
            life.step(may_fail=False)
    life.check()
    assert not life.engine.has_work and not life.open and life.num_told
