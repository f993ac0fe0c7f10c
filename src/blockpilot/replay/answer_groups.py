"""From finished answers to traces, several answers at a time where that is faster.

A GPU spends less time on the arithmetic of one answer than on launching it, so a group of answers shares every pass of
the target and of the drafter. A CPU takes them one by one: there more at once only takes more memory.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.engine.llm import LLM
from blockpilot.replay.anchor_blocks import AnchorBlocks
from blockpilot.replay.anchor_drafts import AnchorDrafts
from blockpilot.replay.answers import Answer, answer_limit
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.finished_text import FinishedText, Reading, read_texts
from blockpilot.replay.traces import Bytes, DraftColumns, Trace, TraceSetting
from blockpilot.replay.visited_walks import walk_sizes

TEXTS_PER_PASS = {"cpu": 1, "cuda": 8}
TOKENS_PER_PASS = 4096  # of a group, padding included: bounds the memory of long texts; one text may have more

Answered = tuple[ReplayRequest, Answer]
Drafted = tuple[Bytes, dict[int, DraftColumns]]  # emitted lengths and what was offered, of one answer


def cut_groups(answered: Sequence[Answered], max_texts: int) -> Iterator[Sequence[Answered]]:
    """Neighbours that share their passes, in order."""
    lengths = [len(request.prompt_ids) + len(answer.token_ids) for request, answer in answered]
    start = 0
    for end in range(1, len(lengths) + 1):
        count = end + 1 - start  # with one more
        if end == len(lengths) or count > max_texts or count * max(lengths[start : end + 1]) > TOKENS_PER_PASS:
            yield answered[start:end]
            start = end


def trace_group(
    llm: LLM, drafter: DFlashDrafter, group: Sequence[Answered], *, config: CollectConfig
) -> Iterator[Trace]:
    """The traces of a group, in order."""
    texts = [
        FinishedText(request.prompt_ids, answer.token_ids, config.params(request.seed)) for request, answer in group
    ]
    readings = read_texts(llm.engine.runner.decoder, texts, tap_layers=drafter.tap_layers)
    drafted = _draft_everywhere(llm, drafter, readings, config=config)
    setting = _setting(llm, drafter, config)
    for (request, answer), reading, (emitted, drafts) in zip(group, readings, drafted, strict=True):
        yield Trace(
            prompt_id=request.prompt_id,
            task=request.task,
            num_prompt_tokens=len(request.prompt_ids),
            answer_ids=np.array(answer.token_ids, dtype=np.int32),
            temperature=config.temperature,
            seed=request.seed,
            max_new_tokens=answer_limit(llm, request, config),
            finish_reason=answer.finish_reason,
            num_disagreements=reading.num_disagreements,
            emitted=emitted,
            prefill=reading.prefill,
            drafts=drafts,
            setting=setting,
        )


def _draft_everywhere(
    llm: LLM, drafter: DFlashDrafter, readings: Sequence[Reading], *, config: CollectConfig
) -> list[Drafted]:
    if config.anchors == "visited":
        slots = llm.engine.runner.cache
        return [(walk_sizes(drafter, reading, sizes=config.sizes, slots=slots), {}) for reading in readings]
    drafts = AnchorDrafts(drafter, readings, max_size=max(config.sizes))
    emitted, offered = [], {}
    for size in config.sizes:
        if size in config.draft_sizes:
            lengths, offered[size] = drafts.record(size, config.num_candidates)
        else:
            lengths = drafts.emitted(size)
        emitted.append(lengths)
    return _split(drafts.blocks, torch.stack(emitted, dim=1), offered)


def _split(blocks: AnchorBlocks, emitted: Tensor, offered: Mapping[int, Mapping[str, Tensor]]) -> list[Drafted]:
    """What was found of all blocks, on the host and answer by answer."""
    columns = {
        size: {name: blocks.split(column.cpu().numpy()) for name, column in found.items()}
        for size, found in offered.items()
    }
    drafts = [
        {size: DraftColumns(**{name: parts[row] for name, parts in found.items()}) for size, found in columns.items()}
        for row in range(len(blocks.counts))
    ]
    return list(zip(blocks.split(emitted.cpu().numpy()), drafts, strict=True))


def _setting(llm: LLM, drafter: DFlashDrafter, config: CollectConfig) -> TraceSetting:
    return TraceSetting(
        sizes=config.sizes,
        trained_block_size=drafter.block_size,
        max_block_size=drafter.max_block_size,
        vocab_size=llm.engine.runner.decoder.config.vocab_size,
        is_every_anchor=config.anchors == "every",
    )
