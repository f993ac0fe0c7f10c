"""One bad input in a process of its own: forked from one that has imported everything, measured, judged.

The parent never computes with PyTorch: a pool of threads would not live on in the children.
"""

import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import NoReturn

import torch

from blockpilot.cli.main import main
from tests.fuzz.command_lines import Case, draw_case

MOST_SECONDS, MOST_MEGABYTES = 5.0, 1024  # until bad input is refused
_LONGEST = 60  # seconds of the clock, for what turned out to be good
_ADDRESSES = 6 << 30  # bytes beyond those of the parent: what asks for more must not take this machine down
# Exit code 1 is for what no input is to blame for; these are the failures that our inputs may meet
_FORESEEN = re.compile(
    "cannot fetch|not download|cannot write|no Ray cluster|No space left|rows differ|out of reach|no finite scores"
)
# A line that names these has caught what it did not understand
_NOT_FORESEEN = re.compile(
    "Traceback|error: unexpected|(Attribute|Key|Type|Index|Assertion|Runtime|Name|ZeroDivision|Overflow|Recursion)Error"
)
_KEPT = ("stdout", "stderr")


@dataclass(frozen=True)
class Outcome:
    """What came of one case."""

    number: int
    words: list[str]
    deeds: list[str]
    exit_code: int
    seconds: float  # of the processor
    megabytes: float  # beyond those of the parent
    fault: str  # empty: all is well

    @property
    def verb(self) -> str:
        return next((word for word in self.words if re.fullmatch("[a-z-]+", word)), "-")


def run_case(world: Path, folder: Path, *, seed: int, number: int) -> Outcome:
    """Draw the case of this number, run it in a copy of the world and say what came of it."""
    folder.mkdir(parents=True)
    inner = folder / "work"
    before = _resident_bytes()
    child = os.fork()
    if child == 0:
        _end(lambda: _prepare_and_run(world, inner, Random(f"{seed}-{number}")))
    status, usage, is_late = _wait(child)
    exit_code = os.waitstatus_to_exitcode(status)
    case = _read_case(folder)
    seconds, megabytes = usage.ru_utime + usage.ru_stime, (usage.ru_maxrss * 1024 - before) / 2**20
    error = (folder / "stderr").read_text(encoding="utf-8", errors="replace")
    fault = "takes longer than a minute" if is_late else judge(exit_code, error, seconds, megabytes)
    outcome = Outcome(number, case.words, case.deeds, exit_code, seconds, megabytes, fault)
    if not fault:
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def judge(exit_code: int, error: str, seconds: float, megabytes: float) -> str:
    """What is wrong with the end of a run; empty where nothing is."""
    last = error.rstrip("\n").rpartition("\n")[2]
    if exit_code not in (0, 1, 2):
        return f"exit code {exit_code}"
    if _NOT_FORESEEN.search(error):
        return "an error that nobody foresaw"
    if exit_code == 1 and not _FORESEEN.search(error):
        return f"exit code 1: {last[:200]}"
    if exit_code == 2 and (not last.startswith("blockpilot: error: ") or error.count("blockpilot: error: ") != 1):
        return f"no single line that says what is wrong: {last[:200]}"
    if exit_code == 2 and seconds > MOST_SECONDS:
        return f"{seconds:.1f} s until it was refused"
    return f"{megabytes:.0f} MB of memory" if megabytes > MOST_MEGABYTES else ""


def _end(work: Callable[[], int]) -> NoReturn:
    """Leave the child without what the parent would do at its end."""
    code = 99
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _prepare_and_run(world: Path, inner: Path, random: Random) -> int:
    os.setpgid(0, 0)
    shutil.copytree(world, inner)
    torch.set_num_threads(1)
    case = draw_case(inner, random)
    (inner.parent / "case.json").write_text(json.dumps(asdict(case)), encoding="utf-8")
    os.environ["BLOCKPILOT_CACHE"] = str(inner / "cache")
    _close_network()
    _redirect(inner.parent)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ADDRESSES,) * 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20,) * 2)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    os.chdir(inner)
    return main(case.words)


def _redirect(folder: Path) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (the child's own, to its end)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def _close_network() -> None:
    def refuse(*_: object) -> NoReturn:
        raise OSError("the network is out of reach")

    socket.socket.connect = refuse  # type: ignore[method-assign]
    socket.getaddrinfo = refuse


def _wait(child: int) -> tuple[int, resource.struct_rusage, bool]:
    """Its status and what it used; whether it had to be ended."""
    end, pause = time.monotonic() + _LONGEST, 0.005
    while time.monotonic() < end:
        found, status, usage = os.wait4(child, os.WNOHANG)
        if found:
            return status, usage, False
        time.sleep(pause)
        pause = min(0.05, pause * 1.5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    return status, usage, True


def _read_case(folder: Path) -> Case:
    path = folder / "case.json"
    for name in _KEPT:
        (folder / name).touch()
    return Case(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else Case([], ["was not drawn"])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def command_of(words: list[str]) -> str:
    return shlex.join(["blockpilot", *words]).encode("utf-8", "backslashreplace").decode()
