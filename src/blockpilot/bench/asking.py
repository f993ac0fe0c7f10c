"""Prompts in, answers out: the turns of a conversation, through `LLM.generate` and nothing else."""

import random
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from blockpilot.bench.answers import Answer, RoundKey
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.engines import Engines
from blockpilot.bench.methods import Method
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.text.prompts import Prompt
from blockpilot.text.tokenizer import Tokenizer

_WARM_UP_TOKENS = 12
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
        self.memory = _PeakMemory(engines.plain.device_type)

    def warm_up(
        self, method: Method, prompts: Sequence[Prompt], report: Callable[[int], None] = lambda num_requests: None
    ) -> None:
        """Kernels are compiled, shapes prepared and step costs measured at first use; see `LLM.prepare`."""
        llm = self.engines.of(method)
        llm.prepare(len(prompts), report, pilot=method.pilot)
        params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, temperature=self.config.temperature)
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
    told = ("token_ids", "text", "num_prompt_tokens", "finish_reason", "prefill_seconds", "decode_seconds")
    return Answer(
        task=work.task,
        prompt_id=work.prompts[row].id,
        batch=work.batch,
        turn=turn,
        repeat=work.repeat,
        method=method,
        **{name: getattr(completion, name) for name in told},
        block_sizes=[step.block_size for step in steps],
        verify_sizes=[step.verify_size for step in steps],
        emitted=[step.emitted for step in steps],
        draft_seconds=sum(step.draft_seconds for step in steps),
        verify_seconds=sum(step.verify_seconds for step in steps),
        pilot_seconds=completion.pilot_seconds,
        peak_memory_bytes=peak,
    )


class _PeakMemory:
    """Of the device on a GPU, of this process on a CPU.

    On Linux the process's high-water mark is set back at every start; elsewhere it is that of the whole run.
    """

    def __init__(self, device_type: str) -> None:
        self.is_cuda = device_type == "cuda"

    def start(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            _CLEAR.write_text("5", encoding="ascii")
        except OSError:
            return  # no such file here, or not allowed: the mark only rises

    def read(self) -> int:
        """Bytes."""
        if self.is_cuda:
            return int(torch.cuda.max_memory_allocated())
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
            return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        except (OSError, StopIteration):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else 1024 * peak
