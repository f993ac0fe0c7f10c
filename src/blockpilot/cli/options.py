"""Options that several verbs share, and how their values are read."""

import argparse
import importlib.util
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TypeVar

from blockpilot.core.config import MAX_BLOCK_SIZE, EngineConfig, device_type
from blockpilot.core.errors import InputError, require_at_least

if TYPE_CHECKING:
    from blockpilot.integrations.ray.cluster import ClusterOptions

_Value = TypeVar("_Value")
Options = argparse._ActionsContainer  # a parser, or a group of its options
DEFAULT_TARGET = "smollm2-135m"


def add_option(options: Options, flag: str, default: Any, about: str = "", **more: Any) -> None:
    """An option whose value has the type of its default; its help ends with that default."""
    shown = f"default: %(default){'g' if isinstance(default, float) else 's'}"
    given = {"type": type(default), "help": f"{about} ({shown})" if about else shown, **more}
    if "choices" not in given:
        given.setdefault("metavar", "X" if given["type"] is float else "N")
    options.add_argument(flag, default=default, **given)


def add_target_options(
    options: Options,
    drafter_help: str | None = None,
    device_help: str = "cpu or cuda",
    *,
    has_integers: bool = True,
) -> None:
    """--target, --drafter where a help text for it is given, --device, --dtype; --quantize where int8 runs."""
    add_option(options, "--target", DEFAULT_TARGET, "preset, Hugging Face folder, GGUF file or hub id", metavar="MODEL")
    if drafter_help is not None:
        drafter_help += " (default: auto, the one that ships for the target, or else ngram)"
        options.add_argument("--drafter", default="auto", metavar="MODEL", help=drafter_help)
    add_option(options, "--device", "cpu", device_help, metavar="DEVICE")
    if not has_integers:
        dtype_help = "float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 on a GPU)"
        options.add_argument("--dtype", help=dtype_help)
        return
    dtype_help = (
        "float32, bfloat16, float16, or int8 on a CPU (default: bfloat16 on a GPU; on a CPU int8 for quantized "
    )
    options.add_argument("--dtype", help=dtype_help + "files, else float32)")
    quantize_help = "pack a Hugging Face folder to 8 bits for dtype int8: q8_0, kept in the cache folder"
    options.add_argument("--quantize", metavar="FORMAT", help=quantize_help)


def read_fields(config_class: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of those options that are named like fields of the dataclass."""
    names = [field.name for field in fields(config_class)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def read_engine_config(arguments: argparse.Namespace, **more: Any) -> EngineConfig:
    dtype, quantize = arguments.dtype or "auto", getattr(arguments, "quantize", None)
    return EngineConfig(device=arguments.device, dtype=dtype, quantize=quantize, **more)


def read_list(text: str, flag: str, read: Callable[[str], _Value], advice: str) -> list[_Value]:
    """Values separated by commas; `read` raises ValueError for what is none."""
    try:
        return [read(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(f"{flag} {text!r}: {advice}") from error


def read_count(text: str, most: int | None = None) -> int:
    """A whole number in plain digits, from 1 on where it has a limit."""
    if not (text.isascii() and text.isdigit() and len(text) < 20) or (most is not None and not 0 < int(text) <= most):
        raise ValueError(text)
    return int(text)


def read_sizes(text: str, flag: str) -> tuple[int, ...]:
    """`2-6,8` -> 2, 3, 4, 5, 6, 8."""
    advice = f"give block sizes up to {MAX_BLOCK_SIZE} and ranges of them separated by commas, such as 2-8,16"
    ranges = read_list(text, flag, _read_range, advice) if text else []
    return tuple(sorted({size for found in ranges for size in found}))


def _read_range(text: str) -> range:
    first, dash, last = text.partition("-")
    start, end = (read_count(part, MAX_BLOCK_SIZE) for part in (first, last if dash else first))
    if end < start:
        raise ValueError(text)
    return range(start, end + 1)


def add_ray_options(options: Options) -> None:
    ray_help = "work on a Ray cluster: host:port of a running one, or no address to start one on this machine"
    options.add_argument("--ray", nargs="?", const="local", metavar="ADDRESS", help=ray_help)
    workers_help = "default: one per GPU, without GPUs one per machine"
    options.add_argument("--ray-workers", type=int, metavar="N", help=workers_help)


def check_ray(arguments: argparse.Namespace) -> None:
    """What can be wrong with these options, before anything is loaded."""
    if arguments.ray is None:
        if arguments.ray_workers is not None:
            raise InputError("--ray-workers is the number of workers on a Ray cluster: give --ray as well")
        return
    require_at_least(arguments, ray_workers=1)
    if ":" in arguments.device:
        raise InputError(f"--ray gives every worker a GPU of its own: use --device cuda, not {arguments.device}")
    if importlib.util.find_spec("ray") is None:
        raise InputError("--ray needs the package ray: pip install 'blockpilot[ray]'")


def cluster_options(arguments: argparse.Namespace) -> "ClusterOptions":
    from blockpilot.integrations.ray.cluster import ClusterOptions

    return ClusterOptions(arguments.ray, device_type(arguments.device), arguments.ray_workers)
