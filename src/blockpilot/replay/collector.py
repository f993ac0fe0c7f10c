"""From requests to traces on one device: answer once, read the finished text once, draft at every anchor.

Decoding is lossless, so plain decoding writes what every pilot would. On a GPU at temperature 0 the bulk generator of
training writes hundreds of answers in lockstep. It draws no noise of ours, so sampled answers always pass through the
engine.

A GPU spends less time on the arithmetic of one answer than on launching it, so a group of answers shares every pass of
the target and of the drafter. A CPU takes them one by one: there more at once only takes more memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from blockpilot.cache.slots import SlotCache
from blockpilot.core.errors import InputError
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.drafter import DraftRequest, Observation
from blockpilot.engine.llm import LLM
from blockpilot.pilots.fixed import PlainPilot
from blockpilot.pilots.growth import grow_chain
from blockpilot.replay.anchor_drafts import AnchorBlocks, AnchorDrafts
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.finished_text import FinishedText, Reading, read_texts
from blockpilot.replay.traces import Bytes, DraftColumns, Trace, TraceSetting
from blockpilot.training.bulk_generation import BulkGenerator, Row

BULK_ROWS = 256
TEXTS_PER_PASS = {"cpu": 1, "cuda": 8}
TOKENS_PER_PASS = 4096  # of a group, padding included: bounds the memory of long texts; one text may have more


Answered = tuple[ReplayRequest, FinishedText]
_Drafted = tuple[Bytes, dict[int, DraftColumns]]  # emitted lengths and what was offered, of one answer


class Collector:
    """Traces of any shard of the requests, on one device. Shards do not depend on each other."""

    def __init__(self, llm: LLM, requests: Sequence[ReplayRequest], config: CollectConfig) -> None:
        self.llm, self.requests, self.config = llm, requests, config
        self.drafter = require_dflash(llm)
        if not requests:
            raise InputError("no prompts to replay")
        most = max(len(request.prompt_ids) + self._answer_limit(request) for request in requests)
        self.bulk: BulkGenerator | None = None
        if llm.device_type == "cuda" and config.temperature == 0:
            self.bulk = BulkGenerator(
                llm.engine.runner.decoder,
                num_rows=min(BULK_ROWS, config.shard_size, len(requests)),
                capacity=most + 1,
                eos_token_ids=llm.engine.eos_token_ids,
                seed=config.seed,
            )
        self.setting = TraceSetting(
            sizes=config.sizes,
            trained_block_size=self.drafter.block_size,
            max_block_size=self.drafter.max_block_size,
            vocab_size=llm.engine.runner.decoder.config.vocab_size,
            is_every_anchor=config.anchors == "every",
        )

    def trace(self, index: int) -> Iterator[Trace]:
        """The traces of one shard, one after the other."""
        share = self.requests[index * self.config.shard_size : (index + 1) * self.config.shard_size]
        answered = list(zip(share, self.answer(share), strict=True))
        for group in cut_groups(answered, TEXTS_PER_PASS[self.drafter.device.type]):
            yield from self._trace_group(group)

    def answer(self, requests: Sequence[ReplayRequest]) -> list[FinishedText]:
        prompts = [request.prompt_ids for request in requests]
        params = [self.config.params(request.seed) for request in requests]
        if self.bulk is None:
            completions = self.llm.generate(prompts, params, pilot=PlainPilot())
            found = [(completion.token_ids, completion.finish_reason) for completion in completions]
        else:
            limits = [len(request.prompt_ids) + self._answer_limit(request) for request in requests]
            rows = [Row(prompt, 0.0, limit) for prompt, limit in zip(prompts, limits, strict=True)]
            for _ in self.bulk.run(iter(rows)):
                pass
            eos = self.bulk.eos_token_ids
            found = [(row.answer_ids, "stop" if row.answer_ids[-1] in eos else "length") for row in rows]
        return [FinishedText(prompts[place], ids, params[place], reason) for place, (ids, reason) in enumerate(found)]

    def _answer_limit(self, request: ReplayRequest) -> int:
        """Tokens the answer may have: the limit asked for, or what the context leaves."""
        context_length = self.llm.engine.context_length
        room = context_length - len(request.prompt_ids)
        if not request.prompt_ids or room < 1:
            raise InputError(
                f"prompt {request.prompt_id} of {request.task} has {len(request.prompt_ids)} tokens and the context "
                f"holds {context_length}, answer included: leave it out"
            )
        return min(self.config.max_new_tokens, room)

    def _trace_group(self, group: Sequence[Answered]) -> Iterator[Trace]:
        texts = [text for _, text in group]
        readings = read_texts(self.llm.engine.runner, texts, tap_layers=self.drafter.tap_layers)
        drafted = self._draft(readings)
        for (request, text), reading, (emitted, drafts) in zip(group, readings, drafted, strict=True):
            prefill = reading.prefill if self.config.whole_logits else replace(reading.prefill, logits=None)
            yield Trace(
                prompt_id=request.prompt_id,
                task=request.task,
                num_prompt_tokens=len(request.prompt_ids),
                answer_ids=np.array(text.answer_ids, dtype=np.int32),
                temperature=self.config.temperature,
                seed=request.seed,
                max_new_tokens=self._answer_limit(request),
                finish_reason=text.finish_reason,
                num_disagreements=reading.num_disagreements,
                emitted=emitted,
                prefill=prefill,
                drafts=drafts,
                setting=self.setting,
            )

    def _draft(self, readings: Sequence[Reading]) -> list[_Drafted]:
        config = self.config
        if config.anchors == "visited":
            slots = self.llm.engine.runner.cache
            return [(walk_sizes(self.drafter, reading, sizes=config.sizes, slots=slots), {}) for reading in readings]
        drafts = AnchorDrafts(self.drafter, readings, max_size=max(config.sizes))
        emitted, offered = [], {}
        for size in config.sizes:
            if size in config.draft_sizes:
                lengths, offered[size] = drafts.record(size, config.num_candidates)
            else:
                lengths = drafts.emitted(size)
            emitted.append(lengths)
        return _split(drafts.blocks, torch.stack(emitted, dim=1), offered)


def require_dflash(llm: LLM) -> DFlashDrafter:
    if not isinstance(llm.drafter, DFlashDrafter):
        given = llm.drafter.name if llm.drafter else "none"
        raise InputError(f"replay needs a DFlash drafter, got {given}: its blocks are drafted at every anchor at once")
    return llm.drafter


def cut_groups(answered: Sequence[Answered], max_texts: int) -> Iterator[Sequence[Answered]]:
    """Neighbours that share their passes, in order."""
    lengths = [len(text.ids) for _, text in answered]
    start = 0
    for end in range(1, len(lengths) + 1):
        count = end + 1 - start  # with one more
        if end == len(lengths) or count > max_texts or count * max(lengths[start : end + 1]) > TOKENS_PER_PASS:
            yield answered[start:end]
            start = end


def _split(blocks: AnchorBlocks, emitted: Tensor, offered: Mapping[int, Mapping[str, Tensor]]) -> list[_Drafted]:
    """What was found of all blocks, on the host and answer by answer."""
    columns: dict[int, dict[str, Any]] = {
        size: {name: blocks.split(column.cpu().numpy()) for name, column in found.items()}
        for size, found in offered.items()
    }
    drafts = [
        {size: DraftColumns(**{name: parts[row] for name, parts in found.items()}) for size, found in columns.items()}
        for row in range(len(blocks.counts))
    ]
    return list(zip(blocks.split(emitted.cpu().numpy()), drafts, strict=True))


@dataclass
class _Walk:
    """A fixed chain on its way through a finished answer."""

    slot: int  # of the drafter
    size: int
    emitted: Bytes  # [A], to be filled
    place: int = 0  # answer index of its anchor
    num_seen: int = 0  # tokens its drafter has observed


def walk_sizes(drafter: DFlashDrafter, reading: Reading, *, sizes: Sequence[int], slots: SlotCache) -> Bytes:
    """Emitted lengths [A, S] of fixed chains; 0 at anchors that a chain of that size never visits.

    The drafter drafts at visited anchors only: much less work than every anchor where only a sweep of sizes is
    wanted. The sizes walk side by side as requests do online, one slot of the drafter each, handed out by `slots`.
    """
    emitted = np.zeros((reading.text.num_anchors, len(sizes)), dtype=np.uint8)
    width = slots.num_free
    for start in range(0, len(sizes), width):
        columns = range(start, min(start + width, len(sizes)))
        walks = [_Walk(slots.reserve(), sizes[column], emitted[:, column]) for column in columns]
        try:
            while live := [walk for walk in walks if walk.place < reading.text.num_anchors]:
                _step_walks(drafter, reading, live)
        finally:
            for walk in walks:
                drafter.forget(walk.slot)
                slots.free(walk.slot)
    return emitted


def _step_walks(drafter: DFlashDrafter, reading: Reading, walks: Sequence[_Walk]) -> None:
    """One draft of every walk, and on to where the answer confirms it."""
    text, ids, taps = reading.text, reading.text.ids, reading.taps
    observations, requests = [], []
    for walk in walks:
        position = len(text.prompt_ids) + walk.place
        new = slice(walk.num_seen, position)
        observations.append(Observation(walk.slot, ids[new], taps[new]))
        walk.num_seen = position
        request = DraftRequest(walk.slot, ids[position], position, walk.size, num_candidates=1, params=text.params)
        requests.append(request)
    drafter.observe(observations)
    for walk, draft in zip(walks, drafter.propose(requests), strict=True):
        chain = grow_chain(draft, ids[len(text.prompt_ids) + walk.place], walk.size - 1).token_ids[1:]
        following = text.answer_ids[walk.place + 1 :]
        is_right = [drafted == true for drafted, true in zip(chain, following, strict=False)]
        accepted = [*is_right, False].index(False)
        count = min(accepted + 1, len(following))  # with the target's own next token, cut at the answer's end
        walk.emitted[walk.place] = count
        walk.place += count
