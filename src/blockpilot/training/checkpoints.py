"""How a run stops and goes on.

On disk it leaves one checkpoint, replaced whole, and a log of JSON lines that never runs ahead of it. It stops between
two steps, not inside one: schedulers announce the end of a machine with SIGTERM and people press Ctrl-C; both only
raise a flag that the loop looks at. A second signal means "now": it raises KeyboardInterrupt wherever the program is.
"""

import errno
import json
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import atomic_path, write_text
from blockpilot.core.manifests import require_same_run

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
# May differ when a run goes on: what memory allows, and what is evaluated, saved or compiled when.
_FREE_KEYS = ("batch_size", "blocks", "evaluate_every", "checkpoint_every", "is_compiled")

logger = logging.getLogger(__name__)


def save_checkpoint(out: Path, state: Mapping[str, Any]) -> None:
    """Replace the checkpoint; whatever goes wrong, the old one stays."""
    try:
        with atomic_path(out / CHECKPOINT) as path:
            try:
                torch.save(state, path)
            except RuntimeError as error:  # how PyTorch reports a full disk
                raise OSError(errno.EIO, f"{str(error).splitlines()[0]} (is the disk full?)") from error
    except BlockPilotError as error:
        raise BlockPilotError(f"{error}; make room and give the same command again to go on") from error


def load_checkpoint(out: Path, identity: Mapping[str, Any], device: torch.device) -> dict[str, Any] | None:
    """The state to go on from; None when there is none; an error that names the key when it is of another run."""
    path = out / CHECKPOINT
    if not path.is_file():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        saved = dict(state["identity"])
    except Exception as error:  # a damaged file fails in many ways
        raise InputError(f"{path} is no readable checkpoint: delete it to start anew") from error
    for key, (was, now) in require_same_run(path, saved, identity, free=_FREE_KEYS).items():
        logger.warning("going on with another %s: %r, was %r", key, now, was)
    return state


def append_log(out: Path, row: Mapping[str, Any]) -> None:
    with (out / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    """Every row; a last line that a crash cut short is left out."""
    path = out / LOG
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            logger.warning("%s: left out an unreadable line", path)


def trim_log(out: Path, step: int) -> None:
    """Drop rows written after the checkpoint: those steps will run again."""
    rows = [json.dumps(row) + "\n" for row in read_log(out) if row["step"] <= step]
    write_text(out / LOG, "".join(rows))


class TrainingStoppedError(BlockPilotError):
    """Somebody asked for the stop; nothing is wrong."""

    def __init__(self, message: str, signal_number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number  # what shells expect


@dataclass
class StopFlag:
    received: int = 0  # the first SIGINT or SIGTERM; 0: none yet


@contextmanager
def stop_flag() -> Iterator[StopFlag]:
    """While active, the first signal to stop is only noted."""
    flag, previous = StopFlag(), {}

    def receive(number: int, frame: FrameType | None) -> None:
        if flag.received:
            raise KeyboardInterrupt
        flag.received = number
        logger.warning("stopping after this step; once more to stop at once")

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, receive)
    except ValueError:  # only the main thread may; elsewhere signals are not ours to handle
        pass
    try:
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
