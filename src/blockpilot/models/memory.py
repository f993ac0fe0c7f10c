"""What a target needs, computed from its configuration before anything is allocated.

On a GPU all of it is taken at once. On a CPU weights are, and the cache grows with the texts: pages that nobody has
touched cost nothing. So there only what the first tokens take must fit. A cache that the system would not even promise
is refused too, and one that a single long text could outgrow is told of.
"""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from blockpilot.core.config import MAX_TREE_NODES
from blockpilot.core.device import Placement
from blockpilot.core.errors import InputError
from blockpilot.models.config import DecoderConfig

logger = logging.getLogger(__name__)
CODE_BYTES = 1.35  # of a weight in codes while it is loaded: a code, two float32 numbers for 32, and a K-quant's own
_GIGABYTE = 10**9
_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes."""

    weights: int = 0
    cache: int = 0
    passes: int = 0
    num_slots: int = 0
    context_length: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.passes

    def __str__(self) -> str:
        what = f"cache of {self.num_slots} slots x {self.context_length} tokens"
        parts = {"weights": self.weights, what: self.cache, "passes": self.passes}
        return ", ".join(f"{name} {size / _GIGABYTE:.1f}" for name, size in parts.items() if size)


def estimate(
    config: DecoderConfig,
    *,
    dtype: torch.dtype,
    num_slots: int,
    context_length: int,
    token_budget: int,
    drafter_bytes: int = 0,
) -> Need:
    """`dtype` is that of the weights; caches of int8 are in half precision."""
    is_coded = dtype == torch.int8
    row = 2 * config.num_layers * config.num_kv_heads * config.head_dim * (2 if is_coded else dtype.itemsize)
    return Need(
        weights=weight_bytes(config, dtype) + drafter_bytes,
        cache=num_slots * (context_length + MAX_TREE_NODES) * row,
        passes=_pass_bytes(config, token_budget) + (2 * 4 * config.head_dim * context_length if is_coded else 0),
        num_slots=num_slots,
        context_length=context_length,
    )


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Of embeddings, layers and head; in int8 embeddings and routers stay float32."""
    vocabulary = config.vocab_size * config.hidden_size
    routers, layers = 0, config.num_layers * _attention_numbers(config)
    for index in range(config.num_layers):
        if config.moe is None or index in config.moe.dense_layers:
            layers += 3 * config.hidden_size * config.intermediate_size
        else:
            layers += 3 * config.hidden_size * config.moe.intermediate_size * config.moe.num_experts
            routers += config.hidden_size * config.moe.num_experts
    if dtype == torch.int8:
        return int(CODE_BYTES * (layers + vocabulary)) + 4 * (vocabulary + routers)
    return (layers + routers + vocabulary * (1 if config.is_tied else 2)) * dtype.itemsize


def _attention_numbers(config: DecoderConfig) -> int:
    biases = config.head_dim * (config.num_heads + 2 * config.num_kv_heads) if config.has_qkv_bias else 0
    return 2 * config.hidden_size * config.head_dim * (config.num_heads + config.num_kv_heads) + biases


def _pass_bytes(config: DecoderConfig, token_budget: int) -> int:
    """Float32 states of a piece of a prompt, and the logits of one request's largest check."""
    inner = config.intermediate_size if config.moe is None else config.moe.intermediate_size * config.moe.num_active
    width = 4 * config.hidden_size + 3 * inner + 2 * config.head_dim * (config.num_heads + config.num_kv_heads)
    return 4 * (token_budget * width + (MAX_TREE_NODES + 1) * config.vocab_size)


def require_engine_room(
    config: DecoderConfig, placement: Placement, *, token_budget: int, name: str, is_placed: bool = False
) -> None:
    """Before a loaded target is placed: whether cache and passes fit too; on a GPU the weights as well, unless they are
    there."""
    is_coded, device = placement.linear_backend == "int8", placement.device
    num_slots, context_length = placement.num_slots, placement.context_length
    need = estimate(
        config,
        dtype=torch.int8 if is_coded else placement.dtype,
        num_slots=num_slots,
        context_length=context_length,
        token_budget=token_budget,
    )
    if device.type != "cpu":
        require_room(name, replace(need, weights=0) if is_placed else need, available_bytes(device))
        return
    need, free = replace(need, weights=0), available_bytes(device)  # they are here
    if need.cache > _promised_bytes():
        raise InputError(_refusal(name, need, _promised_bytes()))
    rows = min(token_budget, context_length)
    row = need.cache // (num_slots * (context_length + MAX_TREE_NODES))
    require_room(name, replace(need, cache=rows * row, num_slots=1, context_length=rows), free)
    if (whole := need.cache // num_slots + need.passes) > free:
        told = name, context_length, whole / _GIGABYTE, free / _GIGABYTE
        logger.warning("%s: a text of %d tokens would need %.1f GB and %.1f GB are free: lower --context-length", *told)


def require_room(name: str, need: Need, free: int | None = None) -> None:
    """Refuse what does not fit; `free` is what the machine has by default."""
    free = available_bytes(torch.device("cpu")) if free is None else free
    if need.total > free:
        raise InputError(_refusal(name, need, free))


def _refusal(name: str, need: Need, free: int) -> str:
    what = "lower --context-length, use fewer slots, or a quantized file" if need.cache else "use a quantized file"
    has = f"{free / _GIGABYTE:.1f} GB are free"
    return f"{name} needs {need.total / _GIGABYTE:.1f} GB ({need}) and {has}: {what}, or a smaller model"


def available_bytes(device: torch.device) -> int:
    """What can be taken now: of a GPU, or of this machine within the limits of its control groups."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by PyTorch, for what comes
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    system = _read_numbers(_PROC / "meminfo").get("MemAvailable:", _installed_bytes() // 1024) * 1024
    return max(0, min([system, *_group_rooms()]))


def _installed_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _promised_bytes() -> int:
    """The largest piece of memory that the system hands out untouched."""
    policy = _read_number(_PROC / "sys" / "vm" / "overcommit_memory")
    swap = _read_numbers(_PROC / "meminfo").get("SwapTotal:", 0) * 1024
    return 1 << 62 if policy == 1 else _installed_bytes() + swap


def _group_rooms() -> list[int]:
    """What each control group around this process has left; files that are only kept in memory make room."""
    rooms = []
    for folder, most, used, prefix in _groups():
        limit, current = _read_number(folder / most), _read_number(folder / used)
        if limit is not None and current is not None:
            stat = _read_numbers(folder / "memory.stat")
            kept = stat.get(f"{prefix}inactive_file", 0) + stat.get(f"{prefix}active_file", 0)
            rooms.append(limit - max(0, current - kept))
    return rooms


def _groups() -> list[tuple[Path, str, str, str]]:
    """Folders of the two versions, innermost first, with the names of their files."""
    found = []
    for line in _read_lines(_PROC / "self" / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        names: tuple[str, str, str] | None = None
        if not controllers:
            root, names = _CGROUPS, ("memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        if names is not None:
            inner = root / path.strip("/")
            folders = [inner, *(parent for parent in inner.parents if parent.is_relative_to(root))]
            found += [(folder, *names) for folder in dict.fromkeys([*folders, root])]
    return found


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []  # no such system, or no such limit


def _read_number(path: Path) -> int | None:
    """None also for `max`: no limit."""
    lines = _read_lines(path)
    return int(lines[0]) if lines and lines[0].isdecimal() else None


def _read_numbers(path: Path) -> Mapping[str, int]:
    rows = [line.split() for line in _read_lines(path)]
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
