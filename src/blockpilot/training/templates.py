"""Task templates: how texts that the target wrote become prompts of many kinds.

A file (JSON; the one that ships is `assets/templates/everyday.json`) holds three tables:

    lists       words and phrases that stand for their name in braces, e.g. `{language}`; they may name other lists
    materials   what the target is asked to write first: passages, programs, ... ; their prompts name lists
    tasks       prompts that name lists and one material, e.g. `Summarise this in {style}.\\n\\n{passage}`

A task's `share` is its part of the mix, `pieces` how many texts of its material are joined, `tokens` the longest
answer, `then` what the user may say next, `turns` how often at most. Which prompt number i of a seed is depends on
(templates, materials, seed, i) alone.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from blockpilot.core.errors import InputError
from blockpilot.core.files import MEGABYTE
from blockpilot.core.reading import read_json

SHIPPED = Path(__file__).resolve().parents[1] / "assets" / "templates" / "everyday.json"
_MAX_FILE_BYTES = 16 * MEGABYTE
_MAX_FILLED = 2**16  # characters of a template, whatever its lists put in
_MAX_NAMES, _MAX_LISTS = 4096, 512
_NAME = re.compile(r"\{([a-z][a-z0-9_]*)\}")  # other braces are text
_JOINT = "\n\n"

_Text = Annotated[str, Meta(min_length=1, max_length=2**16)]
_Texts = Annotated[list[_Text], Meta(min_length=1, max_length=2**16)]
_Tokens = Annotated[int, Meta(ge=8, le=2**16)]
_Share = Annotated[float, Meta(ge=0, le=10**6)]
_Pieces = Annotated[int, Meta(ge=1, le=64)]


class Material(Struct, forbid_unknown_fields=True, frozen=True):
    """What the target writes to have something to work on."""

    name: _Text
    prompts: _Texts
    tokens: _Tokens = 192


class Task(Struct, forbid_unknown_fields=True, frozen=True):
    name: _Text
    prompts: _Texts
    share: _Share = 1.0
    pieces: tuple[_Pieces, _Pieces] = (1, 1)
    tokens: _Tokens = 256
    then: Annotated[list[_Text], Meta(max_length=2**12)] = []
    turns: Annotated[int, Meta(ge=0, le=8)] = 1  # further ones, at most; without `then` there are none


class _File(Struct, forbid_unknown_fields=True):
    tasks: Annotated[list[Task], Meta(max_length=_MAX_NAMES)]
    about: str = ""
    lists: Annotated[dict[str, _Texts], Meta(max_length=_MAX_LISTS)] = {}
    materials: Annotated[list[Material], Meta(max_length=_MAX_NAMES)] = []


@dataclass(frozen=True)
class TaskPrompt:
    task: int  # its number among the tasks
    text: str
    then: tuple[str, ...]  # what the user says next, turn by turn


class Templates:
    def __init__(self, lists: Mapping[str, Sequence[str]], materials: Sequence[Material], tasks: Sequence[Task]):
        """Raises ValueError, which names what is wrong."""
        self.lists, self.materials, self.tasks = lists, materials, tasks
        self._shares = [task.share for task in tasks]
        self._check()
        found = [_names(task.prompts) & {material.name for material in materials} for task in tasks]
        self._material_of = [next(iter(names), None) for names in found]

    @classmethod
    def read(cls, path: Path) -> "Templates":
        file = read_json(path, _File, most=_MAX_FILE_BYTES)
        if file is None:
            raise InputError(f"task templates {path} do not exist; leave out --templates for those that ship")
        try:
            return cls(file.lists, file.materials, file.tasks)
        except ValueError as error:
            raise InputError(f"{path}: {error}") from error

    def as_plain(self) -> dict[str, Any]:
        """Everything that prompts depend on, for a manifest."""
        tables = {"lists": self.lists, "materials": self.materials, "tasks": self.tasks}
        plain: dict[str, Any] = msgspec.to_builtins(tables)
        return plain

    def material_needs(self, num_prompts: int) -> dict[str, float]:
        """About how many texts of each material so many prompts are made of."""
        needs = {material.name: 0.0 for material in self.materials}
        for task, name in zip(self.tasks, self._material_of, strict=True):
            if name is not None:
                needs[name] += num_prompts * task.share / sum(self._shares) * sum(task.pieces) / 2
        return {name: need for name, need in needs.items() if need}

    def material_prompt(self, name: str, random: Random) -> str:
        material = next(one for one in self.materials if one.name == name)
        return self._fill(random.choice(material.prompts), random, {})

    def material_tokens(self, name: str) -> int:
        return next(one.tokens for one in self.materials if one.name == name)

    def task(self, seed: int, index: int) -> int:
        """The number of the task that prompt number `index` of a seed is of."""
        return self._draw_task(Random(f"{seed}:{index}"))

    def prompt(
        self, seed: int, index: int, materials: Mapping[str, Sequence[str]], *, most_pieces: int = 64
    ) -> TaskPrompt:
        """Prompt number `index` of a seed; `materials` are the texts that the target has written, by name."""
        random = Random(f"{seed}:{index}")
        number = self._draw_task(random)
        task, name = self.tasks[number], self._material_of[number]
        texts: dict[str, str] = {}
        if name is not None:
            pieces = min(random.randint(*task.pieces), most_pieces, len(materials[name]))
            texts[name] = _JOINT.join(random.sample(materials[name], pieces))
        text = self._fill(random.choice(task.prompts), random, texts)
        turns = random.randint(0, task.turns) if task.then else 0
        then = random.sample(task.then, min(turns, len(task.then)))
        return TaskPrompt(number, text, tuple(self._fill(one, random, texts) for one in then))

    def _draw_task(self, random: Random) -> int:
        return random.choices(range(len(self.tasks)), self._shares)[0]

    def _fill(self, template: str, random: Random, texts: Mapping[str, str]) -> str:
        def replace(found: re.Match[str]) -> str:
            name = found[1]
            return texts[name] if name in texts else self._fill(random.choice(self.lists[name]), random, {})

        return _NAME.sub(replace, template)

    def _check(self) -> None:
        if not any(self._shares):
            raise ValueError("the mix is empty: give a task whose share is above 0")
        materials = {material.name for material in self.materials}
        _require_unique([material.name for material in self.materials], "material")
        _require_unique([task.name for task in self.tasks], "task")
        if both := sorted(materials & self.lists.keys()):
            raise ValueError(f"{both[0]!r} is a list and a material")
        for name, entries in self.lists.items():
            self._require_known(_names(entries), set(), f"list {name!r}")
        longest: dict[str, int] = {}
        for name in self.lists:
            self._measure(name, (), longest)
        for material in self.materials:
            self._require_known(_names(material.prompts), set(), f"material {material.name!r}")
            _require_short(material.prompts, longest, f"material {material.name!r}")
        for task in self.tasks:
            self._check_task(task, materials)
            _require_short([*task.prompts, *task.then], longest, f"task {task.name!r}")

    def _check_task(self, task: Task, materials: set[str]) -> None:
        where = f"task {task.name!r}"
        if task.pieces[0] > task.pieces[1]:
            raise ValueError(f"{where}: pieces are the fewest and the most, got {list(task.pieces)}")
        self._require_known(_names(task.prompts), materials, where)
        self._require_known(_names(task.then), materials, where)
        if len(used := sorted(_names([*task.prompts, *task.then]) & materials)) > 1:
            raise ValueError(f"{where} names two materials, {used[0]!r} and {used[1]!r}: a task has one")
        if used and not all(_names([prompt]) & materials for prompt in task.prompts):
            raise ValueError(f"{where}: each of its prompts must name {{{used[0]}}}, or none")

    def _require_known(self, names: set[str], materials: set[str], where: str) -> None:
        if unknown := sorted(names - self.lists.keys() - materials):
            kinds = "neither a list nor a material" if materials else "no list"
            raise ValueError(f"{where} names {{{unknown[0]}}}, which is {kinds}")

    def _measure(self, name: str, way: tuple[str, ...], longest: dict[str, int]) -> None:
        """Find how long an entry of a list can become; a list that leads back to itself is an error."""
        if name in longest:
            return
        if name in way:
            raise ValueError(f"list {name!r} is endless: {' -> '.join(f'{{{one}}}' for one in (*way, name))}")
        for inner in sorted(_names(self.lists[name])):
            self._measure(inner, (*way, name), longest)
        longest[name] = _require_short(self.lists[name], longest, f"list {name!r}")


def _require_short(templates: Sequence[str], longest: Mapping[str, int], where: str) -> int:
    """The most characters that one of the templates can have once lists are filled in."""
    most = max(len(one) + sum(longest.get(name, 0) for name in _NAME.findall(one)) for one in templates)
    if most > _MAX_FILLED:
        raise ValueError(f"{where} can become {most:,} characters long; at most {_MAX_FILLED:,}")
    return most


def _names(templates: Sequence[str]) -> set[str]:
    return {name for template in templates for name in _NAME.findall(template)}


def _require_unique(names: Sequence[str], what: str) -> None:
    if double := next((name for place, name in enumerate(names) if name in names[:place]), None):
        raise ValueError(f"two {what}s are named {double!r}")
