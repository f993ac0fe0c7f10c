"""Measures what drafts and checks cost inside vLLM: its own engine, its own steps, seen from outside.

Requests of random tokens ask for `probe:B:N`: draft blocks of B, check N tokens. The time of a step whose requests all
ask alike is what it costs, scheduling and sampling included. With t(B, N) such a time:

    a plain step             t(1, 0)               nothing is drafted; vLLM's drafter still reads the new tokens
    draft of a block of B    t(B, 0) - t(1, 0)
    check of N + 1 tokens    t(B, N) - t(B, 0) + t(1, 0), at the largest B

Rounds repeat all of them in a new order, so that drift hits all alike.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from blockpilot.core.errors import InputError
from blockpilot.integrations.vllm.settings import KEY
from blockpilot.pilots.cost_model import CostPoint, StepCosts

NUM_STEPS = 6  # of a probe, the first of which is not counted
Times = dict[tuple[int, int], list[float]]  # (block size, checked tokens) -> milliseconds


@dataclass(frozen=True, kw_only=True)
class ProbePlan:
    num_draft_tokens: int = 15
    batch_sizes: tuple[int, ...] = (1,)
    context: int = 256
    num_rounds: int = 8

    def probes(self) -> list[tuple[int, int]]:
        """(block size, checked tokens): drafts that check nothing, then checks behind the largest draft."""
        largest = self.num_draft_tokens + 1
        sizes = sorted({size for size in (4, 8, 12, 16, 24, 32) if size < largest} | {largest})
        checked = sorted({count for count in (1, 2, 3, 5, 7, 11, 15, 23, 31) if count < largest} | {largest - 1})
        return [(1, 0), *((size, 0) for size in sizes), *((largest, count) for count in checked)]


def measure_costs(engine: Any, make_params: Any, plan: ProbePlan, key: Mapping[str, Any]) -> StepCosts:
    """`engine` is vLLM's `LLMEngine`, `make_params` its `SamplingParams`."""
    limit, needed = engine.vllm_config.model_config.max_model_len, NUM_STEPS * (plan.num_draft_tokens + 2)
    if plan.context + needed > limit:
        raise InputError(f"a context of {plan.context} leaves no room: at most {limit - needed} with this engine")
    parts = [
        split_times(_time_rounds(engine, make_params, plan, size), batch_size=size, context=plan.context)
        for size in plan.batch_sizes
    ]
    draft = tuple(point for part in parts for point in part.draft)
    verify = tuple(point for part in parts for point in part.verify)
    return StepCosts(draft, verify, key={**key, "num_rounds": plan.num_rounds})


def split_times(times: Times, *, batch_size: int, context: int) -> StepCosts:
    """Whole steps taken apart. The overhead stays inside the checks: a plain step is the check of one token."""
    medians = {probe: float(np.median(values)) for probe, values in times.items()}
    plain, largest = medians[1, 0], max(size for size, _ in medians)
    draft, verify = [], [_point(times[1, 0], 1, plain, batch_size, context)]
    for (size, count), ms in sorted(medians.items()):
        if count:
            cost = max(ms - medians[largest, 0] + plain, plain)
            verify.append(_point(times[size, count], count + 1, cost, batch_size, context))
        elif size > 1:
            draft.append(_point(times[size, 0], size, max(ms - plain, 0.0), batch_size, 0))
    return StepCosts(tuple(draft), tuple(verify))


def _point(values: Sequence[float], tokens: int, ms: float, batch_size: int, context: int) -> CostPoint:
    low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return CostPoint(tokens, ms, batch_size, context, (high - low) / 2 / max(median, 1e-9))


def _time_rounds(engine: Any, make_params: Any, plan: ProbePlan, batch_size: int) -> Times:
    probes, shuffle = plan.probes(), random.Random(0)
    times: Times = {probe: [] for probe in probes}
    for probe in probes:  # the first run of a shape prepares kernels
        _time_probe(engine, make_params, probe, batch_size, plan.context)
    for _ in range(plan.num_rounds):
        for probe in shuffle.sample(probes, len(probes)):
            times[probe] += _time_probe(engine, make_params, probe, batch_size, plan.context)
    return times


def _time_probe(engine: Any, make_params: Any, probe: tuple[int, int], batch_size: int, context: int) -> list[float]:
    """Milliseconds of single steps in which all requests take part."""
    size, count = probe
    vocabulary = engine.vllm_config.model_config.get_vocab_size()
    params = make_params(
        temperature=0, max_tokens=NUM_STEPS * (count + 2), ignore_eos=True, extra_args={KEY: f"probe:{size}:{count}"}
    )
    names = [f"probe-{time.monotonic_ns()}-{index}" for index in range(batch_size)]
    for index, name in enumerate(names):
        words = random.Random(index)  # the same at every probe: cached prefixes save time
        prompt = [words.randrange(vocabulary) for _ in range(context)]
        engine.add_request(name, {"prompt_token_ids": prompt}, params)
    times: list[float] = []
    seen: set[str] = set()
    while len(times) < NUM_STEPS and engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs = engine.step()
        elapsed = 1e3 * (time.perf_counter() - started)
        if len(seen) == batch_size and len(outputs) == batch_size:
            times.append(elapsed)
        seen |= {output.request_id for output in outputs}
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return times[1:]  # the first one may still be waiting for the last prompt
