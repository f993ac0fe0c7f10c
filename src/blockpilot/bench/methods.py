"""The methods of a benchmark: a name, the drafter it needs, and the pilot that decodes with it.

ar                  plain decoding, what everything is compared with
ngram               chains copied from the text so far
eagle3, eagle3-tree chains and trees of the EAGLE-3 head; their sizes suit the device unless they are named
dflash:B            chains of block size B from the DFlash drafter
best-fixed          the dflash:B that is fastest on calibration prompts, chosen inside the run
tree:N, tree:N@B    N nodes from the DFlash drafter
best-fixed-tree     the same for some usual trees
blockpilot          the paper's pilot: one block size per request, read off the prefill
chain-step, step    a size, or a tree, for every step
auto                what `generate` uses by default: `step` under another name, so where both are asked for it is
                    measured once, as auto
"""

import os.path
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blockpilot.bench.config import CANDIDATES, KNOWN_METHODS
from blockpilot.core.config import MAX_EAGLE3_BLOCK_SIZE, cache_dir, device_type
from blockpilot.core.errors import InputError
from blockpilot.models.shipped import DRAFTERS
from blockpilot.pilots.files import read_card
from blockpilot.pilots.registry import load_pilot
from blockpilot.replay.trace_files import shipped_traces

DEFAULT_METHODS: tuple[str, ...] = ("ar", "ngram", "eagle3", "eagle3-tree", "dflash:4", "dflash:8", "dflash:16")
DEFAULT_METHODS += ("dflash:32", "best-fixed", "tree:15", "blockpilot", "chain-step", "auto")
_USUAL_SIZES = {  # checks are cheap on a GPU; EAGLE-3's on a CPU were the best of several on calibration prompts
    "ngram": {"cpu": "4", "cuda": "8"},
    "eagle3": {"cpu": "6", "cuda": "8"},
    "eagle3-tree": {"cpu": "6@4", "cuda": "31"},
}
ADAPTIVE = ("chain-step", "step", "auto")
PAPER = "blockpilot"
NO_DRAFTER = "none"
DRAFTER_OPTIONS = {"dflash": "--drafter", "eagle3": "--eagle3"}


@dataclass(frozen=True)
class Method:
    name: str
    drafter: str  # dflash, eagle3, ngram or none
    pilot: str  # by name, as `LLM.generate` takes it; empty until it has been chosen


def parse_methods(
    names: Sequence[str], *, device: str, target: str, pilot_folder: Path | None = None
) -> tuple[Method, ...]:
    """The methods by name, each once, plain decoding first."""
    unique = dict.fromkeys(["ar", *names])
    if "auto" in unique:
        unique.pop("step", None)
    return tuple(_parse(name, device_type(device), target, pilot_folder) for name in unique)


def candidates(name: str) -> tuple[Method, ...]:
    """What a method is chosen from."""
    return tuple(_parse(one, "cpu", "", None) for one in CANDIDATES[name])


def _parse(name: str, device: str, target: str, pilot_folder: Path | None) -> Method:
    kind, colon, size = name.partition(":")
    if name == "ar":
        return Method(name, NO_DRAFTER, "ar")
    if name in CANDIDATES:
        return Method(name, "dflash", "")
    if name == PAPER:
        return Method(name, "dflash", f"prefill:{find_paper_pilot(target, pilot_folder)}")
    if name in ADAPTIVE:
        return Method(name, "dflash", name)
    if kind not in _USUAL_SIZES and not (colon and kind in ("dflash", "tree")):
        raise InputError(f"unknown method {name!r}; known: {KNOWN_METHODS}")
    drafter = kind.removesuffix("-tree") if kind in _USUAL_SIZES else "dflash"
    shape = "tree" if kind.endswith("tree") else "fixed"
    method = Method(name, drafter, f"{shape}:{size if colon else _USUAL_SIZES[kind][device]}")
    try:
        pilot = load_pilot(method.pilot)
    except InputError as error:
        raise InputError(f"method {name!r}: {str(error).partition(': ')[2]}") from error
    if not pilot.num_candidates:
        raise InputError(f"method {name!r}: a block of size 1 drafts nothing; that is the method ar")
    block_size = getattr(pilot, "block_size", None) or getattr(pilot, "draft_size", None) or 0
    if drafter == "eagle3" and block_size > MAX_EAGLE3_BLOCK_SIZE:
        raise InputError(f"method {name!r}: EAGLE-3 drafts blocks of up to {MAX_EAGLE3_BLOCK_SIZE}")
    return method


def paper_pilot_folder(target: str) -> Path:
    """Where `train-pilot` puts a prefill pilot unless it is told otherwise, and where it is looked for."""
    return cache_dir() / "pilots" / f"{Path(target).name}-prefill"


def find_paper_pilot(target: str, given: Path | None) -> Path:
    folder = given or paper_pilot_folder(target)
    if not os.path.isfile(folder / "pilot.json"):
        command = "blockpilot train-pilot --kind prefill"
        if given is not None or shipped_traces(target) is None:
            command += f" --traces TRACES --out {folder}"
        raise InputError(
            f"method {PAPER} needs a trained pilot, and there is none in {folder}: build it with `{command}` "
            "(minutes), or name another folder with --pilot-file"
        )
    if (kind := read_card(folder).kind) != "prefill":
        raise InputError(f"method {PAPER} needs a prefill pilot, and {folder} holds one of kind {kind!r}")
    return folder


def shipped_of_kind(kind: str, target: str) -> str | None:
    """The drafter of that kind that ships for the target."""
    return next((name for name, drafter in DRAFTERS.items() if drafter.target == target and kind in name), None)


def choose_drafters(methods: Sequence[Method], target: str, given: dict[str, str]) -> dict[str, str]:
    """Kind -> drafter to load: what was given, else what ships for the target. `given` may say auto."""
    chosen: dict[str, str] = {}
    for method in methods:
        kind = method.drafter
        if kind not in DRAFTER_OPTIONS:
            chosen.setdefault(kind, kind)
            continue
        spec = given.get(kind, "auto")
        shipped = shipped_of_kind(kind, target)
        if spec == "auto" and shipped is None:
            title = {"dflash": "a DFlash", "eagle3": "an EAGLE-3"}[kind]
            raise InputError(
                f"method {method.name!r} needs {title} drafter, and none ships for {target}: "
                f"give {DRAFTER_OPTIONS[kind]} MODEL, or leave the method out"
            )
        chosen[kind] = str(shipped) if spec == "auto" else spec
    return chosen
