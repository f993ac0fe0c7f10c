"""Is the text the same as that of plain decoding? Every difference is counted, and named.

Where the engine is exact (`LLM.is_exact`), a token's logits are the same bits in every pass, and a difference is a
mismatch: a bug. Counting ends at a prompt's first difference: what follows it is another text.

Other engines, and paths of this one that are not exact, round differently in passes of different shapes. So two tokens
whose scores are all but equal may change places. A `Judge` recognises such a near-tie by one pass of the target over
the plain text up to the difference: both tokens must lie within a small gap of the best score there. With sampling the
scores are logits / temperature + noise. Anything else is a mismatch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from blockpilot.bench.answers import Answer
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.plan import encode_turn
from blockpilot.engine.llm import LLM
from blockpilot.models.noise import gumbel_noise
from blockpilot.text.prompts import Prompt

GAPS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5, "int8": 0.5}  # of scores; coarser numbers tie more often


@dataclass(frozen=True)
class Difference:
    task: str
    method: str
    prompt_id: str
    repeat: int
    turn: int
    position: int  # in the answer
    gap: float | None = None  # None where nobody judged, or one text ends and the other goes on
    is_near_tie: bool = False


@dataclass(frozen=True)
class Place:
    """A prompt and its seed."""

    prompt: Prompt
    seed: int


@dataclass(frozen=True)
class Judge:
    """Tells near-ties from mismatches. `places` are by task and prompt id; `llm` drafts nothing."""

    llm: LLM
    config: BenchConfig
    places: Mapping[tuple[str, str], Place]

    @property
    def most(self) -> float:
        """The largest gap of a near-tie."""
        return GAPS[self.llm.config.dtype]

    @torch.inference_mode()
    def score(self, plain: Sequence[Answer], position: int) -> torch.Tensor:
        """What the token at `position` of the last plain answer is the argmax of [V]; before it come earlier turns."""
        place, replies = self.places[plain[-1].task, plain[-1].prompt_id], [answer.text for answer in plain[:-1]]
        token_ids = encode_turn(self.llm.tokenizer, place.prompt, replies) + plain[-1].token_ids[:position]
        params, runner = self.config.params(place.seed), self.llm.engine.runner
        self.llm.engine.settle()
        slot = runner.cache.reserve()
        try:
            logits = runner.prefill([(slot, token_ids)], ()).logits.float()  # [1, V]
        finally:
            runner.cache.free(slot)
        if params.is_greedy:
            return logits[0]
        noise = gumbel_noise(params.seed, [len(token_ids)], vocab_size=logits.shape[-1], device=logits.device)
        return (logits / params.temperature + noise)[0]


def find_differences(answers: Sequence[Answer], plain: Sequence[Answer], judge: Judge | None) -> list[Difference]:
    """All answers against the plain ones. Without a judge every difference is a mismatch."""
    expected = {(answer.task, answer.prompt_id, answer.turn): answer for answer in plain}
    talks: dict[tuple[str, str, str, int], list[Answer]] = {}
    for answer in sorted(answers, key=lambda answer: answer.turn):
        talks.setdefault((answer.task, answer.method, answer.prompt_id, answer.repeat), []).append(answer)
    parted: dict[tuple[str, str, int, int], list[Answer]] = {}  # by task, prompt, turn and first other token
    for talk in talks.values():
        for ours in talk:
            wanted = expected[ours.task, ours.prompt_id, ours.turn]
            if ours.token_ids != wanted.token_ids:
                position = _part(ours.token_ids, wanted.token_ids)
                parted.setdefault((ours.task, ours.prompt_id, ours.turn, position), []).append(ours)
                break  # what follows is another text
    found: list[Difference] = []
    for (task, prompt_id, turn, position), those in parted.items():
        found += _examine(those, [expected[task, prompt_id, earlier] for earlier in range(turn + 1)], position, judge)
    return found


def group_differences(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """One line for all answers that differ at the same token and gap: `answers` are the repeats of each method."""
    lines: dict[tuple[object, ...], dict[str, Any]] = {}
    for one in differences:
        facts = asdict(one)
        method, repeat = facts.pop("method"), facts.pop("repeat")
        line = lines.setdefault(tuple(facts.values()), facts | {"answers": {}})
        line["answers"].setdefault(method, []).append(repeat)
    return list(lines.values())


def _part(token_ids: Sequence[int], expected: Sequence[int]) -> int:
    """The first position where two texts differ, or where one ends."""
    pairs = enumerate(zip(token_ids, expected, strict=False))
    ends = min(len(token_ids), len(expected))
    return next((position for position, (token_id, other_id) in pairs if token_id != other_id), ends)


def _examine(those: Sequence[Answer], plain: Sequence[Answer], position: int, judge: Judge | None) -> list[Difference]:
    """Answers that part from the last of `plain` at `position`."""
    expected, scores, found = plain[-1].token_ids, None, []
    if judge is not None and position < len(expected):
        scores = judge.score(plain, position)
    for ours in those:
        one = Difference(ours.task, ours.method, ours.prompt_id, ours.repeat, ours.turn, position)
        if judge is not None and scores is not None and position < len(ours.token_ids):
            gap = float(scores.max() - scores[[ours.token_ids[position], expected[position]]].min())
            one = replace(one, gap=gap, is_near_tie=gap <= judge.most)
        found.append(one)
    return found
