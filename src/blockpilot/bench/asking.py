"""Prompts in, answers out: the turns of a conversation, through `LLM.generate` and nothing else."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blockpilot.bench.answers import Answer, RoundKey
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.engines import Engines
from blockpilot.bench.memory import PeakMemory
from blockpilot.bench.methods import Method
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.text.prompts import Prompt
from blockpilot.text.tokenizer import Tokenizer

WARM_UP_TOKENS = 12


@dataclass(frozen=True)
class Round:
    """A batch of prompts of one task that every method answers in turn."""

    task: str
    batch: int
    repeat: int
    prompts: tuple[Prompt, ...]
    first_place: int  # of its first prompt in the task; seeds count on from there

    @property
    def key(self) -> RoundKey:
        return self.task, self.batch, self.repeat

    @property
    def num_answers(self) -> int:
        """Of one method."""
        return sum(len(prompt.turns) for prompt in self.prompts)

    def seeds(self, seed: int) -> list[int]:
        return [seed + self.first_place + place for place in range(len(self.prompts))]

    def shuffle(self, methods: Sequence[Method], seed: int) -> list[Method]:
        """An order of its own, so that drift of the machine hits all methods alike."""
        order = random.Random(f"{seed} {self.task} {self.batch} {self.repeat}")
        return order.sample(list(methods), len(methods))


def encode_turn(tokenizer: Tokenizer, prompt: Prompt, replies: Sequence[str]) -> list[int]:
    """The conversation up to the user turn after `replies`, which the model itself has given."""
    messages = []
    for said, reply in zip(prompt.turns, replies, strict=False):
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": reply}]
    messages.append({"role": "user", "content": prompt.turns[len(replies)]})
    return tokenizer.encode(tokenizer.apply_chat_template(messages))


class Asker:
    def __init__(self, engines: Engines, config: BenchConfig) -> None:
        self.engines, self.config = engines, config
        self.memory = PeakMemory(engines.plain.device_type)

    def warm_up(
        self, method: Method, prompts: Sequence[Prompt], report: Callable[[int], None] = lambda num_requests: None
    ) -> None:
        """Kernels are compiled, shapes prepared and step costs measured at first use; see `LLM.prepare`."""
        llm = self.engines.of(method)
        llm.prepare(len(prompts), report, pilot=method.pilot)
        params = SamplingParams(max_new_tokens=WARM_UP_TOKENS, temperature=self.config.temperature)
        llm.generate([encode_turn(llm.tokenizer, prompt, []) for prompt in prompts], params, pilot=method.pilot)

    def ask(self, work: Round, method: Method) -> list[Answer]:
        """Every turn of the round's prompts; those that have a next turn go on together."""
        llm = self.engines.of(method)
        seeds, replies = work.seeds(self.config.seed), [list[str]() for _ in work.prompts]
        answers: list[Answer] = []
        for turn in range(max(len(prompt.turns) for prompt in work.prompts)):
            rows = [row for row, prompt in enumerate(work.prompts) if turn < len(prompt.turns)]
            prompt_ids = [encode_turn(llm.tokenizer, work.prompts[row], replies[row]) for row in rows]
            params = [self.config.params(seeds[row]) for row in rows]
            self.memory.start()
            completions = llm.generate(prompt_ids, params, pilot=method.pilot)
            peak = self.memory.read()
            llm.engine.settle()  # a step begun in vain must not delay who comes next
            for row, completion in zip(rows, completions, strict=True):
                replies[row].append(completion.text)
                answers.append(_record(work, row, turn=turn, method=method.name, completion=completion, peak=peak))
        return answers


def _record(work: Round, row: int, *, turn: int, method: str, completion: Completion, peak: int) -> Answer:
    steps = completion.steps
    return Answer(
        task=work.task,
        prompt_id=work.prompts[row].id,
        batch=work.batch,
        turn=turn,
        repeat=work.repeat,
        method=method,
        token_ids=completion.token_ids,
        text=completion.text,
        num_prompt_tokens=completion.num_prompt_tokens,
        finish_reason=completion.finish_reason,
        block_sizes=[step.block_size for step in steps],
        verify_sizes=[step.verify_size for step in steps],
        emitted=[step.emitted for step in steps],
        prefill_seconds=completion.prefill_seconds,
        decode_seconds=completion.decode_seconds,
        draft_seconds=sum(step.draft_seconds for step in steps),
        verify_seconds=sum(step.verify_seconds for step in steps),
        pilot_seconds=completion.pilot_seconds,
        peak_memory_bytes=peak,
    )
