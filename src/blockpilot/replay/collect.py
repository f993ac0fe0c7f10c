"""From prompts to traces: answer once, read the finished text once, draft at every anchor, record.

The answers, the target's pass and the drafts come from the very objects that decode online, with the same packed
weights. In float32 the recorded lengths are those of online decoding, ties of the drafter excepted; in bfloat16 they
are an estimate, and the manifest says so.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.engine.llm import LLM
from blockpilot.replay.answer_groups import TEXTS_PER_PASS, cut_groups, trace_group
from blockpilot.replay.answers import answer_limit, choose_answers
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.provenance import check_run, describe_run
from blockpilot.replay.trace_files import TraceSet, shard_path, write_manifest, write_shard
from blockpilot.replay.traces import Trace
from blockpilot.text.prompts import Prompt

Report = Callable[[str, int, int], None]  # (what, done, total)
PlacedPrompt = tuple[str, int, Prompt]  # task, place in its file, prompt


def encode_requests(llm: LLM, prompts: Sequence[PlacedPrompt], seed: int) -> list[ReplayRequest]:
    """Each prompt's seed is `seed` plus its place."""
    encode = llm.tokenizer.encode_chat
    return [ReplayRequest(prompt.id, task, encode(prompt.text), seed + place) for task, place, prompt in prompts]


class Collector:
    """Traces of any shard of the requests, on one device. Shards do not depend on each other."""

    def __init__(self, llm: LLM, requests: Sequence[ReplayRequest], config: CollectConfig) -> None:
        self.llm, self.requests, self.config = llm, requests, config
        self.drafter = require_dflash(llm)
        if not requests:
            raise InputError("no prompts to replay")
        for request in requests:
            answer_limit(llm, request, config)
        self.answers = choose_answers(llm, requests, config)

    def describe(self, source: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest of the run, apart from what it will have counted at its end."""
        return describe_run(self.llm, self.requests, self.config, {**source, "generation": self.answers.name})

    def trace(self, index: int) -> Iterator[Trace]:
        """The traces of one shard, one after the other."""
        share = self.requests[index * self.config.shard_size : (index + 1) * self.config.shard_size]
        answered = list(zip(share, self.answers.write(share), strict=True))
        for group in cut_groups(answered, TEXTS_PER_PASS[self.drafter.device.type]):
            yield from trace_group(self.llm, self.drafter, group, config=self.config)


def collect(
    llm: LLM,
    requests: Sequence[ReplayRequest],
    config: CollectConfig,
    *,
    out: Path,
    report: Report,
    source: Mapping[str, Any] | None = None,
) -> TraceSet:
    """Write the traces of all requests into `out`, continuing whatever is there.

    `source` says where prompts and weights come from; like the configuration it must match to continue.
    """
    collector = Collector(llm, requests, config)
    shards = Shards(out, collector.describe(source or {}), report)
    for index in shards.missing:
        traces = []
        for trace in collector.trace(index):
            traces.append(trace)
            shards.clock.tick()
        write_shard(shard_path(out, index), traces, config.precision)
    return shards.finish()


class Shards:
    """The folder of a run: which of its shards are missing, and the manifest at the end."""

    def __init__(self, out: Path, identity: Mapping[str, Any], report: Report) -> None:
        check_run(out, identity)
        self.out, self.identity = out, identity
        self.num_requests, self.shard_size = identity["num_requests"], identity["shard_size"]
        everything = range(-(-self.num_requests // self.shard_size))
        self.missing = [index for index in everything if not shard_path(out, index).is_file()]
        self.clock = Clock(self.num_requests, report)
        self.clock.skip(self.num_requests - sum(map(self.count, self.missing)))

    def count(self, index: int) -> int:
        """Requests of one shard."""
        return min(self.shard_size, self.num_requests - index * self.shard_size)

    def finish(self) -> TraceSet:
        write_manifest(self.out, {**self.identity, "is_complete": True, **_count(TraceSet(self.out))})
        return TraceSet(self.out)


def require_dflash(llm: LLM) -> DFlashDrafter:
    if not isinstance(llm.drafter, DFlashDrafter):
        given = llm.drafter.name if llm.drafter else "none"
        raise InputError(f"replay needs a DFlash drafter, got {given}: its blocks are drafted at every anchor at once")
    return llm.drafter


def _count(traces: TraceSet) -> dict[str, int]:
    """What the folder holds, for the manifest."""
    lengths, disagreements = [], 0
    for trace in traces:
        lengths.append(len(trace.answer_ids))
        disagreements += trace.num_disagreements
    return {
        "num_traces": len(lengths),
        "num_shards": len(traces.shards),
        "num_answer_tokens": sum(lengths),
        "num_disagreements": disagreements,
    }


class Clock:
    """Reports traces done, with the time that the rest will take at the pace of this run."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.report = total, report
        self.done = self.skipped = 0
        self.started = time.perf_counter()

    def skip(self, count: int) -> None:
        self.done += count
        self.skipped += count

    def tick(self, count: int = 1) -> None:
        self.done += count
        pace = (time.perf_counter() - self.started) / (self.done - self.skipped)
        self.report(f"traces ({_duration(pace * (self.total - self.done))} left)", self.done, self.total)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
