"""From prompts to traces: answer once, read the finished text once, draft at every anchor, record.

The answers, the target's pass and the drafts come from the very objects that decode online, with the same packed
weights. In float32 the recorded lengths are those of online decoding, ties of the drafter excepted; in bfloat16 they
are an estimate, and the manifest says so.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.engine.llm import LLM
from blockpilot.replay.anchor_drafts import AnchorDrafts
from blockpilot.replay.answers import Answer, answer_limit, choose_answers
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.finished_text import FinishedText, read_text
from blockpilot.replay.provenance import check_run, describe_run
from blockpilot.replay.trace_files import TraceSet, shard_path, write_manifest, write_shard
from blockpilot.replay.traces import Bytes, DraftColumns, Trace, TraceSetting
from blockpilot.replay.visited_walks import walk_sizes

Report = Callable[[str, int, int], None]  # (what, done, total)


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
    drafter = require_dflash(llm)
    if not requests:
        raise InputError("no prompts to replay")
    for request in requests:
        answer_limit(llm, request, config)
    answers = choose_answers(llm, requests, config)
    identity = describe_run(llm, requests, config, {**(source or {}), "generation": answers.name})
    check_run(out, identity)
    clock = _Clock(len(requests), report)
    num_shards = -(-len(requests) // config.shard_size)
    for index in range(num_shards):
        share = requests[index * config.shard_size : (index + 1) * config.shard_size]
        if shard_path(out, index).is_file():
            clock.skip(len(share))
            continue
        traces = []
        for request, answer in zip(share, answers.write(share), strict=True):
            traces.append(trace_answer(llm, drafter, request, answer, config=config))
            clock.tick()
        write_shard(shard_path(out, index), traces, config.precision)
    write_manifest(out, {**identity, "is_complete": True, **_count(TraceSet(out))})
    return TraceSet(out)


def require_dflash(llm: LLM) -> DFlashDrafter:
    if not isinstance(llm.drafter, DFlashDrafter):
        given = llm.drafter.name if llm.drafter else "none"
        raise InputError(f"replay needs a DFlash drafter, got {given}: its blocks are drafted at every anchor at once")
    return llm.drafter


def trace_answer(
    llm: LLM, drafter: DFlashDrafter, request: ReplayRequest, answer: Answer, *, config: CollectConfig
) -> Trace:
    """The trace of one finished answer."""
    params = config.params(request.seed)
    decoder = llm.engine.runner.decoder
    text = read_text(decoder, request.prompt_ids, answer.token_ids, tap_layers=drafter.tap_layers, params=params)
    emitted, drafts = _draft_everywhere(llm, drafter, text, params=params, config=config)
    return Trace(
        prompt_id=request.prompt_id,
        task=request.task,
        num_prompt_tokens=len(request.prompt_ids),
        answer_ids=np.array(answer.token_ids, dtype=np.int32),
        temperature=config.temperature,
        seed=request.seed,
        max_new_tokens=answer_limit(llm, request, config),
        finish_reason=answer.finish_reason,
        num_disagreements=text.num_disagreements,
        emitted=emitted,
        prefill=text.prefill,
        drafts=drafts,
        setting=_setting(llm, drafter, config),
    )


def _draft_everywhere(
    llm: LLM, drafter: DFlashDrafter, text: FinishedText, *, params: SamplingParams, config: CollectConfig
) -> tuple[Bytes, dict[int, DraftColumns]]:
    if config.anchors == "visited":
        return walk_sizes(drafter, text, params, sizes=config.sizes, slots=llm.engine.runner.cache), {}
    blocks = AnchorDrafts(drafter, text, params, max_size=max(config.sizes))
    emitted, drafts = [], {}
    for size in config.sizes:
        if size in config.draft_sizes:
            lengths, drafts[size] = blocks.record(size, config.num_candidates)
        else:
            lengths = blocks.emitted(size)
        emitted.append(lengths)
    return np.stack(emitted, axis=1), drafts


def _setting(llm: LLM, drafter: DFlashDrafter, config: CollectConfig) -> TraceSetting:
    return TraceSetting(
        sizes=config.sizes,
        trained_block_size=drafter.block_size,
        max_block_size=drafter.max_block_size,
        vocab_size=llm.engine.runner.decoder.config.vocab_size,
        is_every_anchor=config.anchors == "every",
    )


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


class _Clock:
    """Reports traces done, with the time that the rest will take at the pace of this run."""

    def __init__(self, total: int, report: Report) -> None:
        self.total, self.report = total, report
        self.done = self.skipped = 0
        self.started = time.perf_counter()

    def skip(self, count: int) -> None:
        self.done += count
        self.skipped += count

    def tick(self) -> None:
        self.done += 1
        pace = (time.perf_counter() - self.started) / (self.done - self.skipped)
        self.report(f"traces ({_duration(pace * (self.total - self.done))} left)", self.done, self.total)


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
