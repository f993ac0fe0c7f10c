"""Rounds in, answers in a file: every method on the same prompts, in an order shuffled anew for each round."""

import gc
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from blockpilot.bench.answers import Answer, AnswersFile
from blockpilot.bench.asking import Asker, Round
from blockpilot.bench.config import format_duration
from blockpilot.bench.methods import Method

Report = Callable[[str, int, int], None]  # (what, done, total)
logger = logging.getLogger(__name__)


class Progress:
    """Answers done, with the time that the rest will take at the pace of this session."""

    def __init__(self, report: Report, total: int) -> None:
        self.report, self.total = report, total
        self.done = self.skipped = 0
        self.started = time.perf_counter()

    def prepare(self, what: str) -> None:
        """Not counted: the pace is that of answers alone."""
        self.report(what, self.done, self.total)

    def start(self) -> None:
        self.started, self.skipped = time.perf_counter(), self.done

    def skip(self, count: int) -> None:
        self.done += count
        self.skipped += count

    def advance(self, what: str, count: int) -> None:
        self.done += count
        pace = (time.perf_counter() - self.started) / (self.done - self.skipped)
        self.report(f"{what} ({format_duration(pace * (self.total - self.done))} left)", self.done, self.total)


class Measurer(ABC):
    """What a file of answers lacks is measured; where and by whom is up to the kind of measurer."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.left_out: dict[str, str] = {}  # task -> why it has no results

    def measure(self, rounds: Sequence[Round], methods: Sequence[Method], path: Path) -> AnswersFile:
        """Answer what the file does not hold yet. A task that does not fit into memory is left out."""
        file = AnswersFile(path)
        file.drop_incomplete({work.key: work.num_answers * len(methods) for work in rounds})
        done = file.rounds
        todo = [work for work in rounds if work.key not in done]
        self.progress.skip(sum(work.num_answers for work in rounds if work.key in done) * len(methods))
        if todo:
            self.measure_rounds(todo, methods, file)
        for task in self.left_out:
            file.drop_task(task)
        file.sort([work.key for work in rounds])
        return file

    @abstractmethod
    def measure_rounds(self, rounds: Sequence[Round], methods: Sequence[Method], file: AnswersFile) -> None:
        """Append the answers of all methods to each of these rounds, and note tasks that do not fit into memory."""

    def leave_out(self, task: str, reason: str) -> None:
        self.left_out[task] = reason
        logger.warning("task %s is left out, %s", task, reason)


class LocalMeasurer(Measurer):
    def __init__(self, asker: Asker, progress: Progress, seed: int) -> None:
        super().__init__(progress)
        self.asker, self.seed = asker, seed

    def measure_rounds(self, rounds: Sequence[Round], methods: Sequence[Method], file: AnswersFile) -> None:
        self.warm_up(methods, rounds)
        self.progress.start()
        with short_collections():
            for work in rounds:
                if work.task in self.left_out:
                    self.progress.skip(work.num_answers * len(methods))
                    continue
                try:
                    for answers in self.answer_round(work, methods):
                        file.append(answers)
                        self.progress.advance(f"{work.task}, {answers[0].method}", len(answers))
                except (RuntimeError, MemoryError) as error:
                    self.leave_out(work.task, explain_shortage(error))

    def warm_up(self, methods: Sequence[Method], rounds: Sequence[Round]) -> None:
        """Where memory is short already, the rounds will tell which task does not fit.

        A GPU prepares other shapes for long contexts, so it is warmed up with the longest prompts too.
        """
        longest = max(rounds, key=_longest_turn)
        is_gpu = self.asker.engines.plain.device_type == "cuda"
        chosen = [rounds[0], longest] if is_gpu and longest is not rounds[0] else [rounds[0]]
        for method in methods:
            name = f"warming up {method.name}"
            self.progress.prepare(name)

            def report(num_requests: int, name: str = name) -> None:
                self.progress.prepare(f"{name}, passes of {num_requests} requests")

            try:
                for work in chosen:
                    self.asker.warm_up(method, work.prompts, report)
            except (RuntimeError, MemoryError) as error:
                explain_shortage(error)

    def answer_round(self, work: Round, methods: Sequence[Method]) -> Iterator[list[Answer]]:
        """The answers of one method after the other."""
        for method in work.shuffle(methods, self.seed):
            yield self.asker.ask(work, method)


@contextmanager
def short_collections() -> Iterator[None]:
    """Garbage collection passes over what is there now. It takes long to look at all of it, and someone is timed."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _longest_turn(work: Round) -> int:
    return max(len(turn) for prompt in work.prompts for turn in prompt.turns)


def explain_shortage(error: RuntimeError | MemoryError) -> str:
    """One line about memory that ran out, which is given back where it can be; any other error is raised again."""
    if not is_out_of_memory(error):
        raise error
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return f"out of memory: {' '.join(str(error).split())[:200]}"


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """PyTorch raises RuntimeError, or a class made of it, on a GPU and on a CPU alike."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text
