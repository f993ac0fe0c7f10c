"""Rounds in, answers in a file: every method on the same prompts, in an order shuffled anew for each round."""

import gc
import logging
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from blockpilot.bench.answers import Answer, AnswersFile, RoundKey
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.methods import NO_DRAFTER, Method
from blockpilot.bench.plan import Round, encode_turn
from blockpilot.core.device import is_out_of_memory
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.progress import Progress
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM

_SHORTAGES = (RuntimeError, MemoryError, BlockPilotError)  # the last: of a pass that was shared
_WARM_UP_TOKENS = 12
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
Found = tuple[Round, list[Answer], str | None]  # one method's answers; or none, and why memory ran out
AnswerRounds = Callable[[Sequence[Round], Sequence[Method], Progress], Iterator[Found]]  # by whoever has the models
logger = logging.getLogger(__name__)


class Measurer:
    """What a file of answers lacks is measured. A task that does not fit into memory is left out."""

    def __init__(self, answer_rounds: AnswerRounds, progress: Progress) -> None:
        self.answer_rounds, self.progress = answer_rounds, progress
        self.left_out: dict[str, str] = {}  # task -> why it has no results

    def measure(self, rounds: Sequence[Round], methods: Sequence[Method], path: Path) -> list[Answer]:
        """The answers of all methods, in the order of the rounds: workers may have finished them in another.

        Tasks that could not be finished have no results; their lines stay in the file.
        """
        file = AnswersFile(path)
        file.drop_incomplete({work.key: work.num_answers * len(methods) for work in rounds})
        _require_asked(file, rounds, methods)
        done = {answer.round_key for answer in file.answers}
        todo = [work for work in rounds if work.key not in done and work.task not in self.left_out]
        num_answers = sum(work.num_answers for work in rounds) - sum(work.num_answers for work in todo)
        self.progress.skip(num_answers * len(methods))
        if todo:
            self._measure(todo, methods, file)
        places = {work.key: place for place, work in enumerate(rounds)}
        kept = [answer for answer in file.answers if answer.task not in self.left_out]
        return sorted(kept, key=lambda answer: places[answer.round_key])

    def _measure(self, rounds: Sequence[Round], methods: Sequence[Method], file: AnswersFile) -> None:
        num_done = Counter[RoundKey]()
        for work, answers, shortage in self.answer_rounds(rounds, methods, self.progress):
            if shortage is None:
                file.append(answers)
                num_done[work.key] += len(answers)
                self.progress.advance(f"{work.task}, {answers[0].method}", len(answers))
                continue
            self.progress.skip(work.num_answers * len(methods) - num_done[work.key])
            if work.task not in self.left_out:
                self.left_out[work.task] = shortage
                logger.warning("task %s is left out, %s", work.task, shortage)


def _require_asked(file: AnswersFile, rounds: Sequence[Round], methods: Sequence[Method]) -> None:
    """Refuse answers that these rounds do not ask for: somebody else wrote into the file."""
    asked = {
        (*work.key, prompt.id, turn, method.name)
        for work in rounds
        for prompt in work.prompts
        for turn in range(len(prompt.turns))
        for method in methods
    }
    given = [(*one.round_key, one.prompt_id, one.turn, one.method) for one in file.answers]
    if len(set(given)) < len(given) or not asked.issuperset(given):
        raise InputError(f"{file.path} holds answers that this run does not ask for: choose another --out")


class Asker:
    """Prompts in, answers out: the turns of a conversation, through `LLM.generate` and nothing else."""

    def __init__(self, llms: Mapping[str, LLM], config: BenchConfig) -> None:
        """`llms` by kind of drafter; the one without a drafter is always there."""
        self.llms, self.config = llms, config

    @property
    def plain(self) -> LLM:
        return self.llms[NO_DRAFTER]

    def answer_rounds(self, rounds: Sequence[Round], methods: Sequence[Method], progress: Progress) -> Iterator[Found]:
        """All methods on all rounds; `progress` starts when the models are warm."""
        self.warm_up(methods, rounds, progress)
        progress.start()
        gc.collect()
        gc.freeze()  # garbage collection skips objects that exist now: scanning them all would fall into timed steps
        shortages: dict[str, str] = {}  # by task
        try:
            for work in rounds:
                if work.task in shortages:
                    yield work, [], shortages[work.task]
                    continue
                for found in self.answer_round(work, methods):
                    yield found
                    if found[2] is not None:
                        shortages[work.task] = found[2]
        finally:
            gc.unfreeze()

    def answer_round(self, work: Round, methods: Sequence[Method]) -> Iterator[Found]:
        """One method after the other, until memory runs out."""
        try:
            for method in work.shuffle(methods, self.config.seed):
                yield work, self.ask(work, method), None
        except _SHORTAGES as error:
            yield work, [], _explain_shortage(error)

    def warm_up(self, methods: Sequence[Method], rounds: Sequence[Round], progress: Progress) -> None:
        """Run every method once, uncounted: kernels are compiled, shapes prepared and step costs measured at first use.

        A GPU prepares other shapes for long contexts, so it is warmed up with the longest prompts too. Out of memory is
        no error yet: the rounds tell which task does not fit.
        """
        longest = max(rounds, key=lambda work: max(len(turn) for prompt in work.prompts for turn in prompt.turns))
        is_gpu = self.plain.device_type == "cuda"
        chosen = [rounds[0], longest] if is_gpu and longest is not rounds[0] else [rounds[0]]
        params = SamplingParams(max_new_tokens=_WARM_UP_TOKENS, temperature=self.config.temperature)
        for method in methods:
            name, llm = f"warming up {method.name}", self.llms[method.drafter]
            progress.prepare(name)

            def report(num_requests: int, name: str = name) -> None:
                progress.prepare(f"{name}, passes of {num_requests} requests")

            try:
                for work in chosen:
                    llm.prepare(len(work.prompts), report, pilot=method.pilot)
                    prompts = [encode_turn(llm.tokenizer, prompt, []) for prompt in work.prompts]
                    llm.generate(prompts, params, pilot=method.pilot)
            except _SHORTAGES as error:
                _explain_shortage(error)

    def ask(self, work: Round, method: Method) -> list[Answer]:
        """Every turn of the round's prompts; those that have a next turn go on together."""
        llm = self.llms[method.drafter]
        replies = [list[str]() for _ in work.prompts]
        answers: list[Answer] = []
        for turn in range(max(len(prompt.turns) for prompt in work.prompts)):
            rows = [row for row, prompt in enumerate(work.prompts) if turn < len(prompt.turns)]
            prompt_ids = [encode_turn(llm.tokenizer, work.prompts[row], replies[row]) for row in rows]
            params = [self.config.params(self.config.seed + work.first_place + row) for row in rows]
            _reset_peak(llm.engine.runner.device)
            completions = llm.generate(prompt_ids, params, pilot=method.pilot)
            peak = _read_peak(llm.engine.runner.device)
            llm.engine.settle()  # a step begun in vain must not delay who comes next
            for row, completion in zip(rows, completions, strict=True):
                replies[row].append(completion.text)
                answers.append(_record(work, row, turn=turn, method=method.name, completion=completion, peak=peak))
        return answers


def _record(work: Round, row: int, *, turn: int, method: str, completion: Completion, peak: int) -> Answer:
    steps = completion.steps
    told = ("token_ids", "text", "num_prompt_tokens", "finish_reason")
    timed = ("prefill_seconds", "decode_seconds", "pilot_seconds")
    return Answer(
        task=work.task,
        prompt_id=work.prompts[row].id,
        batch=work.batch,
        turn=turn,
        repeat=work.repeat,
        method=method,
        **{name: getattr(completion, name) for name in (*told, *timed)},
        block_sizes=[step.block_size for step in steps],
        verify_sizes=[step.verify_size for step in steps],
        emitted=[step.emitted for step in steps],
        draft_seconds=sum(step.draft_seconds for step in steps),
        verify_seconds=sum(step.verify_seconds for step in steps),
        peak_memory_bytes=peak,
    )


def _explain_shortage(error: Exception) -> str:
    """One line about memory that ran out, which is given back where it can be; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory: {' '.join(str(error).split())[:200]}"


def _reset_peak(device: torch.device) -> None:
    """Set back the high-water mark of memory: of the device on a GPU, of this process on Linux; elsewhere it only
    rises."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # no such file here, or not allowed
        _CLEAR.write_text("5", encoding="ascii")


def _read_peak(device: torch.device) -> int:
    """Bytes."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        lines = _STATUS.read_text(encoding="utf-8").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else 1024 * peak
