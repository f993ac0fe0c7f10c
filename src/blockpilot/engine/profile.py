"""What steps cost on this machine: measured once, then remembered by machine, pair, dtype, backend and threads."""

import json
import logging
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from blockpilot import __version__
from blockpilot.core.config import cpu_name, profile_file
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import MEGABYTE, read_bytes, remove_leftovers, write_text
from blockpilot.core.reading import decode_json
from blockpilot.engine.step_timing import ProfilePlan, Report, time_steps
from blockpilot.models.packing import REVISION
from blockpilot.pilots.cost_model import StepCosts

if TYPE_CHECKING:
    from blockpilot.engine.llm import LLM

logger = logging.getLogger(__name__)
MAX_BYTES = 16 * MEGABYTE  # of a profile
_ADVICE = "name a file written by `blockpilot profile`"
MAX_ERROR = 0.3  # leave-one-out; a quick measurement beyond it was disturbed
ENOUGH_ROUNDS = 3  # of a quick measurement; a large model has no time for more
IDENTITY = ("target", "shape", "drafter", "device", "dtype", "backend", "kernels", "num_threads")


def ensure_costs(llm: "LLM") -> StepCosts:
    """This machine's costs: remembered where they cover the engine's batches, else measured quickly and remembered."""
    is_gpu = llm.device_type == "cuda"
    batch_sizes = usual_batch_sizes(llm.config.num_slots) if is_gpu else (1,)
    known = load_profile(profile_key(llm))
    if known is not None and (not is_gpu or _covers(known, batch_sizes)):
        return known
    plan = ProfilePlan.quick(batch_sizes, (min(256, llm.engine.context_length // 2),), is_gpu=is_gpu)
    llm.make_room(max(batch_sizes))
    costs = measure(llm, plan)
    if costs.key["num_rounds"] < min(plan.num_rounds, ENOUGH_ROUNDS) or costs.fit_error.leave_one_out > MAX_ERROR:
        logger.warning("step costs are uncertain because the machine is busy; they are not remembered")
        return costs
    if known is not None and not known.key.get("is_quick"):  # careful measurements stay, though they do not serve here
        sizes = sorted({*batch_sizes, *(point.batch_size for point in known.verify)})
        logger.warning(
            "the profile of this machine lacks batches that this engine takes, so they are measured in short at every "
            "start; run `blockpilot profile` once more as it was run, with --batch-sizes %s",
            ",".join(map(str, sizes)),
        )
        return costs
    return remember(costs)


def usual_batch_sizes(num_slots: int) -> tuple[int, ...]:
    """What a GPU is measured with: beside fast passes the host's work for each request shows, and between batches costs
    do not run straight."""
    full = 1 << max(num_slots, 1).bit_length() - 1  # a power of two: totals of tokens divide by it
    return (*(size for size in (1, 4, 16) if size < full), full)


def _covers(costs: StepCosts, batch_sizes: tuple[int, ...]) -> bool:
    """Whether all of the sizes were measured. The largest may be interpolated, where a larger one was measured."""
    measured = {point.batch_size for point in costs.verify}
    *smaller, full = batch_sizes
    return measured.issuperset(smaller) and min(measured) <= full <= costs.max_batch_size


def measure(llm: "LLM", plan: ProfilePlan, report: Report = lambda *_: None) -> StepCosts:
    facts = {"created": datetime.now(UTC).isoformat(timespec="seconds"), "is_quick": plan.is_quick}
    return time_steps(llm, plan, profile_key(llm) | facts, report)


def profile_key(llm: "LLM") -> dict[str, Any]:
    """What a profile depends on."""
    config, device = llm.engine.runner.decoder.config, llm.engine.runner.device
    return {
        "target": llm.target_name,
        "shape": f"{config.num_layers} x {config.hidden_size}",
        "drafter": llm.drafter.name if llm.drafter else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "dtype": llm.config.dtype,
        "backend": llm.linear_backend,
        "kernels": REVISION,
        "num_threads": torch.get_num_threads(),
        "version": __version__,
    }


def profile_path(key: dict[str, Any]) -> Path:
    named = {name: key.get(name) for name in (*IDENTITY, "version")}
    return profile_file(Path(str(key["target"])).name, named)


def load_profile(key: dict[str, Any]) -> StepCosts | None:
    """The remembered costs; None where there are none, or a file that cannot be read or is not what its name says."""
    path = profile_path(key)
    try:
        costs = read_profile(path)
    except InputError as error:
        if path.exists():
            logger.info("measuring again: %s", error)
        return None
    return costs if all(costs.key.get(name) == key[name] for name in (*IDENTITY, "version")) else None


def read_profile(path: Path, key: dict[str, Any] | None = None) -> StepCosts:
    """Costs from a file that the user named. With `key`, those of another machine or pair are refused."""
    values = decode_json(read_bytes(path, MAX_BYTES), dict[str, Any], f"{path} is no profile", _ADVICE)
    try:
        costs = StepCosts.from_dict(values)
    except InputError as error:
        raise InputError(f"{path} is no profile: {error}; {_ADVICE}") from error
    if key is not None and (differing := [name for name in IDENTITY if costs.key.get(name) != key[name]]):
        name = differing[0]
        raise InputError(
            f"{path} is stale: it was measured with {name} {costs.key.get(name)!r:.80}, and this is {key[name]!r}; "
            "measure again with `blockpilot profile`"
        )
    return costs


def remember(costs: StepCosts) -> StepCosts:
    """Write the costs where `load_profile` looks. A cache that cannot be written costs time, not the answer."""
    try:
        path = profile_path(dict(costs.key))
        remove_leftovers(path.parent, days=1)
        write_text(path, json.dumps(costs.to_dict(), indent=1) + "\n")
    except BlockPilotError as error:
        logger.warning("the profile is not remembered: %s", error)
    return costs
