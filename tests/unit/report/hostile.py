"""Run folders that somebody tampered with: hostile words in every place, and values of every wrong kind."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.unit.report.pieces import make_row, write_run

HOSTILE = {
    "markup": '<evil onload="evil()"></evil></td></pre></title></style></svg><script>evil()</script>&lt;--><!--"\' x',
    "markdown": "`evil` ```\n\n# evil\n\n* [evil](evil:x) ![evil](evil.png) <evil> | **evil** http://evil.org ~~x~~\\",
    "formula": "_$\\frac{evil}{ $ $$ {{ evil }} {% evil %} % ${evil}\u2028\u202e\x1b[31m\x00 \u4f60 evil",
}
FILES = ("rows.jsonl", "samples.jsonl", "differences.jsonl", "manifest.json")
WRONG = (None, "x", "", True, -1, 0, 1.5, 1e300, 2**70, [], [None], {}, {"x": "y"}, "9" * 300)
Path_ = tuple[str | int, ...]  # of a value inside a file


def write_whole(folder: Path) -> Path:
    """A run that has something in every place of a report."""
    odd = {"task": "gsm8k", "answers": {"auto": [0]}, "prompt_id": "x", "position": 7, "is_near_tie": False, "gap": 0.5}
    methods = ("ar", "dflash:4", "dflash:8", "dflash:16", "best-fixed", "auto", "ngram")
    rows = [make_row(task, method, mismatches=1, near_ties=1) for task in ("gsm8k", "mean") for method in methods]
    return write_run(
        folder,
        rows,
        [odd, odd | {"is_near_tie": True}],
        reference={"folder": "before"},
        left_out_tasks={"mbpp": "out of memory"},
        prompts_too_long={"swebench": 2},
        prompts={"swebench": {"file": "swebench.jsonl.gz"}},
    )


def read_values(path: Path) -> list[Any]:
    """The lines of a file, or its one value."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]


def write_values(path: Path, values: list[Any]) -> None:
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")


def poison(folder: Path, words: str, spared: Callable[[str], bool]) -> Path:
    """Put words behind every text of a run: values, and keys that are no fields of ours."""
    fields = set(make_row("gsm8k", "ar")) | set(_find_fields(folder))

    def spoil(value: Any, *, is_key: bool = False) -> Any:
        if isinstance(value, dict):
            return {spoil(key, is_key=True): spoil(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [spoil(inner) for inner in value]
        is_kept = not isinstance(value, str) or spared(value) or (is_key and value in fields)
        return value if is_kept else value + words

    for name in FILES:
        write_values(folder / name, [spoil(value) for value in read_values(folder / name)])
    return folder


def _find_fields(folder: Path) -> Iterator[str]:
    """Keys of every object, but for those that are data."""
    data = {"mbpp", "swebench", "gsm8k", "mt_bench", "dflash", "ar", "auto"}
    for name in FILES:
        for value in read_values(folder / name):
            yield from (
                place[-1] for place in find_places(value) if isinstance(place[-1], str) and place[-1] not in data
            )


def find_places(value: Any, before: Path_ = ()) -> Iterator[Path_]:
    """Where values stand inside a value, all levels."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from find_places(inner, (*before, key))


def change(value: Any, place: Path_, new: Any) -> Any:
    """A copy with another value in one place; without it where `new` is the place itself."""
    changed = copy.deepcopy(value)
    holder = changed
    for key in place[:-1]:
        holder = holder[key]
    if new is place:
        del holder[place[-1]]
    else:
        holder[place[-1]] = new
    return changed


def damaged_runs(folder: Path) -> Iterator[str]:
    """Change one value of a run after the other, in every way; tells what is changed, and mends it afterwards."""
    write_whole(folder)
    for name in FILES:
        values = read_values(folder / name)
        for place in find_places(values[-1]):
            for wrong in (*WRONG, place):
                write_values(folder / name, [*values[:-1], change(values[-1], place, wrong)])
                yield f"{name}: {place} is {'absent' if wrong is place else wrong}"
        write_values(folder / name, values)
