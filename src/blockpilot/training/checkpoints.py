"""How a run stops and goes on.

On disk it leaves one checkpoint, replaced whole, and a log of JSON lines that never runs ahead of it. It stops between
two steps, not inside one: schedulers announce the end of a machine with SIGTERM and people press Ctrl-C; both only
raise a flag that the loop looks at. A second signal means "now": it raises KeyboardInterrupt wherever the program is.
"""

import errno
import json
import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from blockpilot.core.device import is_out_of_memory
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import announce_read, append_text, atomic_path, read_text, reason_of, write_text
from blockpilot.core.manifests import require_same_run
from blockpilot.core.reading import Count, convert, decode_json

CHECKPOINT = "checkpoint.pt"
LOG = "log.jsonl"
# May differ when a run goes on: what memory allows, and what is evaluated, saved or compiled when.
_FREE_KEYS = ("batch_size", "blocks", "evaluate_every", "checkpoint_every", "is_compiled")
_MOMENTS = {"AdamW": ("step", "exp_avg", "exp_avg_sq"), "Muon": ("momentum_buffer",)}  # of each parameter

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
        announce_read(path)
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        convert({name: value for name, value in state.items() if name in _State.__annotations__}, _State, str(path))
        saved = state["identity"]
    except OSError as error:
        raise InputError(f"{path} cannot be read: {reason_of(error)}") from error
    except Exception as error:  # a damaged file fails in many ways
        if is_out_of_memory(error):
            raise
        raise InputError(f"{path} is no readable checkpoint: delete it to start anew") from error
    for key, (was, now) in require_same_run(path, saved, identity, free=_FREE_KEYS).items():
        logger.warning("going on with another %s: %r, was %r", key, now, was)
    return state


def restore(model: nn.Module, optimizers: Sequence[Optimizer], state: Mapping[str, Any]) -> None:
    """Go on with weights and moments of a checkpoint; ValueError where they are not of this model."""
    _require_alike(state["model"], model.state_dict())
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        moments = saved.get("state")
        if not isinstance(moments, dict) or not moments.keys() <= set(range(len(parameters))):
            raise ValueError("its moments are not those of the parameters")
        for place, found in moments.items():
            _require_moments(found, parameters[place], _MOMENTS[type(optimizer).__name__])
        # settings follow from the run; those of the file would have to be checked one by one
        optimizer.load_state_dict({"state": moments, "param_groups": optimizer.state_dict()["param_groups"]})
    model.load_state_dict(state["model"])


def _require_moments(found: Any, parameter: Tensor, names: Sequence[str]) -> None:
    """What an optimizer remembers of a parameter: numbers of its shape, and how many steps it has taken."""
    _require_alike(found, {name: torch.empty(()) if name == "step" else parameter.detach() for name in names})
    if any(name in found and bool((found[name] < 0).any()) for name in ("step", "exp_avg_sq")):
        raise ValueError("its moments hold negative numbers")


def _require_alike(found: Any, wanted: Mapping[str, Tensor]) -> None:
    """The same names, shapes and kinds of numbers, all of them finite."""
    if not isinstance(found, dict) or found.keys() != wanted.keys():
        raise ValueError("it holds other tensors")
    for name, own in wanted.items():
        one = found[name]
        if not isinstance(one, Tensor) or (one.shape, one.dtype, one.layout) != (own.shape, own.dtype, own.layout):
            raise ValueError(f"its tensor {name} is of another kind")
        if not bool(one.isfinite().all()):
            raise ValueError(f"its tensor {name} holds numbers that are not finite")


class _Row(TypedDict):
    """What every row of a log has; the rest is for readers."""

    step: Count


class _State(TypedDict):
    identity: dict[str, Any]
    step: Count
    model: dict[str, Any]
    optimizers: list[dict[str, Any]]


def append_log(out: Path, row: Mapping[str, Any]) -> None:
    append_text(out / LOG, json.dumps(row) + "\n")


def read_log(out: Path) -> Iterator[dict[str, Any]]:
    """Every row; a last line that a crash cut short is left out."""
    path = out / LOG
    for line in read_text(path).splitlines() if path.is_file() else ():
        try:
            row: dict[str, Any] = decode_json(line, dict[str, Any], LOG)
            convert(row, _Row, LOG)
        except InputError:
            logger.warning("%s: left out an unreadable line", path)
        else:
            yield row


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
