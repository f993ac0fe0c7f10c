"""Rounds in, answers in a file: every method on the same prompts, in an order shuffled anew for each round."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from blockpilot.bench.answers import AnswersFile
from blockpilot.bench.asking import Asker, Round
from blockpilot.bench.estimate import format_duration
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


class Measurer:
    def __init__(self, asker: Asker, progress: Progress, seed: int) -> None:
        self.asker, self.progress, self.seed = asker, progress, seed
        self.left_out: dict[str, str] = {}  # task -> why it has no results

    def measure(self, rounds: Sequence[Round], methods: Sequence[Method], path: Path) -> AnswersFile:
        """Answer what the file does not hold yet. A task that does not fit into memory is left out."""
        file = AnswersFile(path)
        file.drop_incomplete({work.key: work.num_answers * len(methods) for work in rounds})
        done = file.rounds
        if any(work.key not in done for work in rounds):
            self._warm_up(methods, rounds[0])
            self.progress.start()
        for work in rounds:
            if work.key in done or work.task in self.left_out:
                self.progress.skip(work.num_answers * len(methods))
                continue
            try:
                self._measure_round(work, methods, file)
            except (RuntimeError, MemoryError) as error:
                self._leave_out(work.task, error)
        for task in self.left_out:
            file.drop_task(task)
        return file

    def _warm_up(self, methods: Sequence[Method], work: Round) -> None:
        """Where memory is short already, the rounds will tell which task does not fit."""
        for method in methods:
            self.progress.prepare(f"warming up {method.name}")
            try:
                self.asker.warm_up(method, work.prompts)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise

    def _measure_round(self, work: Round, methods: Sequence[Method], file: AnswersFile) -> None:
        for method in work.shuffle(methods, self.seed):
            answers = self.asker.ask(work, method)
            file.append(answers)
            self.progress.advance(f"{work.task}, {method.name}", len(answers))

    def _leave_out(self, task: str, error: RuntimeError | MemoryError) -> None:
        if not is_out_of_memory(error):
            raise error
        self.left_out[task] = f"out of memory: {' '.join(str(error).split())[:200]}"
        logger.warning("task %s is left out, %s", task, self.left_out[task])
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """PyTorch raises RuntimeError, or a class made of it, on a GPU and on a CPU alike."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text
