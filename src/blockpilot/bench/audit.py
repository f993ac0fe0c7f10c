"""Is the text the same as that of plain decoding? Every difference is looked at, and named.

Kernels of different shapes round differently, so two tokens whose scores are all but equal may change places. Such a
near-tie is recognised by one pass of the target over the plain text up to the difference: both tokens must lie within
a small gap of the best score there. With sampling the scores are logits / temperature + noise. Anything else is a
mismatch and a bug. Counting ends at a prompt's first difference: what follows it is another text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from blockpilot.bench.answers import Answer
from blockpilot.bench.asking import encode_turn
from blockpilot.bench.config import BenchConfig
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from blockpilot.models.noise import gumbel_noise
from blockpilot.text.prompts import Prompt

GAPS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}  # of scores; coarser numbers tie more often


@dataclass(frozen=True)
class Difference:
    task: str
    method: str
    prompt_id: str
    repeat: int
    turn: int
    position: int  # in the answer
    gap: float | None  # None where one text ends and the other goes on
    is_near_tie: bool


@dataclass(frozen=True)
class Place:
    """A prompt and its seed."""

    prompt: Prompt
    seed: int


def find_differences(
    answers: Sequence[Answer], places: Mapping[tuple[str, str], Place], llm: LLM, config: BenchConfig
) -> list[Difference]:
    """All answers against the first plain ones. `places` are by task and prompt id; `llm` drafts nothing."""
    plain = {(a.task, a.prompt_id, a.turn): a for a in answers if a.method == "ar" and a.repeat == 0}
    talks: dict[tuple[str, str, str, int], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.turn):
        talks.setdefault((answer.task, answer.method, answer.prompt_id, answer.repeat), []).append(answer)
    parted: dict[tuple[str, str, int, int | None], list[Answer]] = {}  # by task, prompt, turn and first other token
    for (task, _, prompt_id, _), talk in talks.items():
        ours = next((a for a in talk if a.token_ids != plain[task, prompt_id, a.turn].token_ids), None)
        if ours is not None:
            position = _first_other(ours.token_ids, plain[task, prompt_id, ours.turn].token_ids)
            parted.setdefault((task, prompt_id, ours.turn, position), []).append(ours)
    found: list[Difference] = []
    for (task, prompt_id, turn, position), those in parted.items():
        reference = [plain[task, prompt_id, earlier] for earlier in range(turn + 1)]
        found += _examine(those, position, reference, places[task, prompt_id], llm, config)
    return found


def _first_other(ours: Sequence[int], expected: Sequence[int]) -> int | None:
    """None where one text ends and the other goes on."""
    return next((index for index, (a, b) in enumerate(zip(ours, expected, strict=False)) if a != b), None)


def _examine(
    those: Sequence[Answer],
    position: int | None,
    reference: Sequence[Answer],
    place: Place,
    llm: LLM,
    config: BenchConfig,
) -> list[Difference]:
    """Answers that part from the plain one at the same token; `reference` holds the plain answers up to that turn."""
    expected, scores = reference[-1].token_ids, None
    if position is not None:
        prompt_ids = encode_turn(llm.tokenizer, place.prompt, [answer.text for answer in reference[:-1]])
        scores = _scores(llm, prompt_ids + expected[:position], config.params(place.seed))
    found = []
    for ours in those:
        gap = None
        if position is not None and scores is not None:
            gap = float(scores.max() - scores[[ours.token_ids[position], expected[position]]].min())
        found.append(
            Difference(
                task=ours.task,
                method=ours.method,
                prompt_id=ours.prompt_id,
                repeat=ours.repeat,
                turn=ours.turn,
                position=min(len(ours.token_ids), len(expected)) if position is None else position,
                gap=gap,
                is_near_tie=gap is not None and gap <= GAPS[llm.config.dtype],
            )
        )
    return found


@torch.inference_mode()
def _scores(llm: LLM, token_ids: list[int], params: SamplingParams) -> torch.Tensor:
    """What the next token is the argmax of [V]."""
    llm.engine.settle()
    runner = llm.engine.runner
    slot = runner.cache.reserve()
    try:
        logits = runner.prefill([(slot, token_ids)], ()).logits.float()  # [1, V]
    finally:
        runner.cache.free(slot)
    if params.is_greedy:
        return logits[0]
    noise = gumbel_noise(params.seed, [len(token_ids)], vocab_size=logits.shape[-1], device=logits.device)
    return (logits / params.temperature + noise)[0]
