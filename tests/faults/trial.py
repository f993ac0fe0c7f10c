"""One trial: a run that is disturbed, then the same command again until it ends well; what came of it is judged."""

import random
from dataclasses import dataclass
from pathlib import Path

from blockpilot.core.errors import BlockPilotError
from tests.faults.disk import GROUPS, KINDS, Fault, FaultyDisk, Killed
from tests.faults.results import find_halves, find_hidden, find_kept, is_kept, read_results, real_names
from tests.faults.site import VERBS, Site


@dataclass(frozen=True)
class Trial:
    verb: str
    faults: tuple[Fault, ...]  # of the first run, and of runs after it

    @property
    def kind(self) -> str:
        return self.faults[0].kind


def draw_trial(chance: random.Random, site: Site, *, verb: str | None = None, kind: str | None = None) -> Trial:
    """Any verb and kind, unless they are given; one run in four is disturbed again when it goes on."""
    verb = verb or chance.choice(VERBS)
    kinds = [kind or chance.choice(KINDS), *([chance.choice(KINDS)] if chance.random() < 0.25 else [])]
    return Trial(verb, tuple(_draw_fault(chance, site, verb, kind) for kind in kinds))


def _draw_fault(chance: random.Random, site: Site, verb: str, kind: str) -> Fault:
    """Reads are many and alike, so first the kind of operation is drawn."""
    groups = {"error": tuple(GROUPS), "full": ("write",)}.get(kind, ("write", "sync", "name", "end"))
    group, operations = chance.choice(groups), site.operations[verb]
    places = [place for place, (name, _) in enumerate(operations, start=1) if name in GROUPS.get(group, ())]
    return Fault(kind, chance.choice(places or [len(operations) + 1]), chance.randrange(2**31))


def run_trial(site: Site, trial: Trial, out: Path) -> str | None:
    """What is wrong; None where all is as it should be."""
    disk = FaultyDisk()
    for fault in trial.faults:
        disk = FaultyDisk(fault).follow(disk)
        if (complaint := _disturb(site, trial.verb, disk, fault, out)) is not None:
            return complaint
    kept = find_kept(out)
    with FaultyDisk().follow(disk) as disk:
        if (error := site.run(trial.verb, out)) is not None:
            return f"the restart failed: {error}"
    if disk.unsafe:
        return f"a power cut after the restart takes {disk.unsafe} things"
    if hidden := find_hidden(out):
        return f"the restart left {hidden}"
    return _compare(site, trial.verb, kept, out)


def _disturb(site: Site, verb: str, disk: FaultyDisk, fault: Fault, out: Path) -> str | None:
    error: BaseException | None = None
    with disk:
        try:
            error = site.run(verb, out)
        except Killed as killed:
            error = killed
        except BaseException as unexpected:
            return f"{fault.kind} gave {type(unexpected).__name__}: {unexpected}"
    before = real_names(out)
    if fault.kind == "power":
        disk.cut_power()
        if lost := before - real_names(out) - _last_names(disk, out):
            return f"the power cut took {sorted(lost)}"
    if halves := find_halves(out, site.results[verb]):
        return f"not whole after {fault.kind}: {halves}"
    return _judge_error(fault, error, disk, is_same=read_results(out) == site.results[verb] if error is None else False)


def _last_names(disk: FaultyDisk, out: Path) -> set[str]:
    """What was just being written may be lost: nobody had been told yet that it is kept."""
    return {str(path.relative_to(out)) for _, path in disk.operations[-2:] if path.is_relative_to(out)}


def _judge_error(fault: Fault, error: BaseException | None, disk: FaultyDisk, *, is_same: bool) -> str | None:
    if isinstance(error, BlockPilotError):
        if "\n" in str(error) or (fault.kind == "full" and error.exit_code != 1):
            return f"{fault.kind} gave exit code {error.exit_code} and the line {str(error)!r}"
        return None if disk.has_struck else f"nothing was disturbed, and yet: {error}"
    return None if error is not None or is_same else "the run ended as if all were well, with another result"


def _compare(site: Site, verb: str, kept: dict[str, object], out: Path) -> str | None:
    now, found, expected = find_kept(out), read_results(out), site.results[verb]
    if lost := [name for name in kept if not is_kept(kept[name], now.get(name))]:
        return f"not kept: {lost}"
    names = sorted(found.keys() | expected.keys())
    differing = [name for name in names if found.get(name) != expected.get(name)]
    return f"differs from an undisturbed run: {differing}" if differing else None
