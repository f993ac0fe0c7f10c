"""Is the text the same as that of plain decoding? Every difference is looked at, and named.

Kernels of different shapes round differently, so two tokens whose scores are all but equal may change places. Such a
near-tie is recognised by one pass of the target over the plain text up to the difference: both tokens must lie within
a small gap of the best score there. With sampling the scores are logits / temperature + noise. Anything else is a
mismatch and a bug. Counting ends at a prompt's first difference: what follows it is another text.

In a coarse dtype that pass is rounded, too, by as much as what it judges. Where it finds more than half of what is
granted it is made again with the same weights in float32, and that gap decides.
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from blockpilot.bench.answers import Answer
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.measuring import explain_shortage
from blockpilot.bench.plan import encode_turn
from blockpilot.core.device import Placement
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.decoding.target import TargetRunner
from blockpilot.engine.llm import LLM
from blockpilot.models.noise import gumbel_noise
from blockpilot.text.prompts import Prompt

logger = logging.getLogger(__name__)
GAPS = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.5}  # of scores; coarser numbers tie more often
_DOUBT = 0.5  # share of a coarse gap from which on float32 is asked


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
    exact_gap: float | None = None  # in float32, where the run's dtype is coarser and its gap large

    @property
    def best_gap(self) -> float | None:
        """The most exact one known."""
        return self.gap if self.exact_gap is None else self.exact_gap


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
    for talk in talks.values():
        for ours in talk:
            expected = plain[ours.task, ours.prompt_id, ours.turn].token_ids
            if ours.token_ids != expected:
                pairs = enumerate(zip(ours.token_ids, expected, strict=False))
                position = next((index for index, (token_id, other_id) in pairs if token_id != other_id), None)
                parted.setdefault((ours.task, ours.prompt_id, ours.turn, position), []).append(ours)
                break  # what follows is another text
    found: list[Difference] = []
    judge = _Judge(llm, config)
    for (task, prompt_id, turn, position), those in parted.items():
        reference = [plain[task, prompt_id, earlier] for earlier in range(turn + 1)]
        found += judge.examine(those, position, reference, places[task, prompt_id])
    return found


def group_differences(differences: Sequence[Difference]) -> list[dict[str, Any]]:
    """One line for all answers that differ at the same token and gap: `answers` are the repeats of each method."""
    names = ("task", "prompt_id", "turn", "position", "gap", "exact_gap", "is_near_tie")
    lines: dict[tuple[object, ...], dict[str, Any]] = {}
    for one in differences:
        facts = {name: getattr(one, name) for name in names}
        line = lines.setdefault(tuple(facts.values()), facts | {"answers": {}})
        line["answers"].setdefault(one.method, []).append(one.repeat)
    return list(lines.values())


@dataclass
class _Judge:
    llm: LLM
    config: BenchConfig
    has_room: bool = True  # for the target in float32

    def examine(
        self, those: Sequence[Answer], position: int | None, reference: Sequence[Answer], place: Place
    ) -> list[Difference]:
        """Answers whose first difference from the plain one is at `position`, None where one text is the other's start.

        `reference` holds the plain answers up to that turn.
        """
        expected = reference[-1].token_ids
        if position is None:
            return [_differ(ours, min(len(ours.token_ids), len(expected)), is_near_tie=False) for ours in those]
        prompt_ids = encode_turn(self.llm.tokenizer, place.prompt, [answer.text for answer in reference[:-1]])
        prompt_ids += expected[:position]
        params, most = self.config.params(place.seed), GAPS[self.llm.config.dtype]
        self.llm.engine.settle()
        scores = _scores(self.llm.engine.runner, prompt_ids, params)
        gaps = [_gap(scores, ours.token_ids[position], expected[position]) for ours in those]
        exact = self._exact_scores(prompt_ids, params) if max(gaps) > _DOUBT * most else None
        found = []
        for ours, gap in zip(those, gaps, strict=True):
            exact_gap = None
            if exact is not None and gap > _DOUBT * most:
                exact_gap = _gap(exact, ours.token_ids[position], expected[position])
            is_near_tie = (gap if exact_gap is None else exact_gap) <= most
            found.append(_differ(ours, position, gap=gap, exact_gap=exact_gap, is_near_tie=is_near_tie))
        return found

    def _exact_scores(self, token_ids: list[int], params: SamplingParams) -> torch.Tensor | None:
        """In float32; None where the run's are, or memory has no room."""
        if self.llm.config.dtype == "float32" or not self.has_room:
            return None
        try:
            return _scores(self._exact_runner, token_ids, params)
        except (RuntimeError, MemoryError) as error:
            self.has_room, shortage = False, explain_shortage(error)
            logger.warning("the audit judges in %s and not in float32: %s", self.llm.config.dtype, shortage)
            return None

    @cached_property
    def _exact_runner(self) -> TargetRunner:
        runner, context = self.llm.engine.runner, self.llm.engine.context_length
        placement = Placement(num_slots=1, context_length=context, device=runner.device, dtype=torch.float32)
        return TargetRunner(copy.deepcopy(runner.decoder).float(), placement)


def _differ(ours: Answer, position: int, *, gap: float | None = None, **verdict: Any) -> Difference:
    where = {name: getattr(ours, name) for name in ("task", "method", "prompt_id", "repeat", "turn")}
    return Difference(**where, position=position, gap=gap, **verdict)


def _gap(scores: torch.Tensor, token_id: int, expected_id: int) -> float:
    return float(scores.max() - scores[[token_id, expected_id]].min())


@torch.inference_mode()
def _scores(runner: TargetRunner, token_ids: list[int], params: SamplingParams) -> torch.Tensor:
    """What the next token is the argmax of [V]."""
    slot = runner.cache.reserve()
    try:
        logits = runner.prefill([(slot, token_ids)], ()).logits.float()  # [1, V]
    finally:
        runner.cache.free(slot)
    if params.is_greedy:
        return logits[0]
    noise = gumbel_noise(params.seed, [len(token_ids)], vocab_size=logits.shape[-1], device=logits.device)
    return (logits / params.temperature + noise)[0]
