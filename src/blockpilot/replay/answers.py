"""The one generation that replay needs: through the engine, or in bulk where that is faster and sampling plays no part.

Decoding is lossless, so plain decoding writes what every pilot would. On a GPU at temperature 0 the bulk generator of
training writes hundreds of answers in lockstep. It draws no noise of ours, so sampled answers always pass through the
engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from blockpilot.core.errors import InputError
from blockpilot.engine.llm import LLM
from blockpilot.pilots.fixed import PlainPilot
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.training.bulk_generation import BulkGenerator, Row

BULK_ROWS = 256


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    finish_reason: str


class Answers(Protocol):
    name: str

    def write(self, requests: Sequence[ReplayRequest]) -> list[Answer]: ...


def choose_answers(llm: LLM, requests: Sequence[ReplayRequest], config: CollectConfig) -> Answers:
    if llm.device_type == "cuda" and config.temperature == 0:
        return BulkAnswers(llm, requests, config)
    return EngineAnswers(llm, config)


def answer_limit(llm: LLM, request: ReplayRequest, config: CollectConfig) -> int:
    """Tokens the answer may have: the limit asked for, or what the context leaves."""
    room = llm.engine.context_length - len(request.prompt_ids)
    if not request.prompt_ids or room < 1:
        raise InputError(
            f"prompt {request.prompt_id} of {request.task} has {len(request.prompt_ids)} tokens and the context holds "
            f"{llm.engine.context_length}, answer included: leave it out"
        )
    return min(config.max_new_tokens, room)


class EngineAnswers:
    name = "engine"

    def __init__(self, llm: LLM, config: CollectConfig) -> None:
        self.llm, self.config = llm, config

    def write(self, requests: Sequence[ReplayRequest]) -> list[Answer]:
        params = [self.config.params(request.seed) for request in requests]
        prompts = [request.prompt_ids for request in requests]
        completions = self.llm.generate(prompts, params, pilot=PlainPilot())
        return [Answer(completion.token_ids, completion.finish_reason) for completion in completions]


class BulkAnswers:
    name = "bulk"

    def __init__(self, llm: LLM, requests: Sequence[ReplayRequest], config: CollectConfig) -> None:
        """`requests` are all that will come: they bound the memory."""
        self.llm, self.config = llm, config
        self.generator = BulkGenerator(
            llm.engine.runner.decoder,
            num_rows=min(BULK_ROWS, config.shard_size, len(requests)),
            capacity=1 + max(len(r.prompt_ids) + answer_limit(llm, r, config) for r in requests),
            eos_token_ids=llm.engine.eos_token_ids,
            seed=config.seed,
        )

    def write(self, requests: Sequence[ReplayRequest]) -> list[Answer]:
        rows = [
            Row(request.prompt_ids, 0.0, len(request.prompt_ids) + answer_limit(self.llm, request, self.config))
            for request in requests
        ]
        for _ in self.generator.run(iter(rows)):
            pass
        eos = self.llm.engine.eos_token_ids
        return [Answer(row.answer_ids, "stop" if row.answer_ids[-1] in eos else "length") for row in rows]
