"""Task templates: what is wrong with a file is named, prompts depend on their number alone."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from blockpilot.core.errors import InputError
from blockpilot.training.templates import SHIPPED, Templates

FILE: dict[str, Any] = {
    "about": "for tests",
    "lists": {"topic": ["{thing} in {place}"], "thing": ["tea", "rain"], "place": ["Kelby", "Vorn"]},
    "materials": [{"name": "passage", "prompts": ["write about {topic}"], "tokens": 12}],
    "tasks": [
        {"name": "sum up", "prompts": ["Sum up:\n\n{passage}"], "share": 3, "pieces": [1, 3], "tokens": 16},
        {"name": "ask", "prompts": ["What is {thing}? { }"], "then": ["Why {thing}?", "Go on."], "turns": 2},
    ],
}
TEXTS = {"passage": ["one", "two", "three", "four"]}


def read(folder: Path, **changes: Any) -> Templates:
    path = folder / "tasks.json"
    path.write_text(json.dumps(FILE | changes))
    return Templates.read(path)


def test_a_prompt_depends_on_its_number_alone(tmp_path: Path) -> None:
    templates = read(tmp_path)
    prompts = [templates.prompt(5, index, TEXTS) for index in range(200)]
    assert [templates.prompt(5, index, TEXTS) for index in reversed(range(200))] == prompts[::-1]
    assert [templates.task(5, index) for index in range(200)] == [prompt.task for prompt in prompts]
    assert [templates.prompt(6, index, TEXTS) for index in range(200)] != prompts
    first, second = ([prompt for prompt in prompts if prompt.task == task] for task in (0, 1))
    assert 120 < len(first) < 180, "shares of 3 and 1"
    pieces = [prompt.text.split("\n\n") for prompt in first]
    assert {len(parts) - 1 for parts in pieces} == {1, 2, 3}
    assert all(set(parts[1:]) <= set(TEXTS["passage"]) and len(set(parts)) == len(parts) for parts in pieces)
    assert {prompt.text for prompt in second} == {"What is tea? { }", "What is rain? { }"}
    assert {len(prompt.then) for prompt in second} == {0, 1, 2}
    assert {text for prompt in second for text in prompt.then} == {"Why tea?", "Why rain?", "Go on."}
    assert not any(prompt.then for prompt in first)


def test_fewer_pieces_where_a_prompt_is_too_long(tmp_path: Path) -> None:
    templates = read(tmp_path)
    for index in range(50):
        whole, short = templates.prompt(0, index, TEXTS), templates.prompt(0, index, TEXTS, most_pieces=1)
        assert (whole.task, whole.text[:8]) == (short.task, short.text[:8])
        assert short.text.count("\n\n") <= 1


def test_materials(tmp_path: Path) -> None:
    templates = read(tmp_path)
    assert templates.material_needs(100) == {"passage": 150.0}  # three in four, of two pieces each
    assert templates.material_tokens("passage") == 12
    found = {templates.material_prompt("passage", Random(seed)) for seed in range(40)}
    assert found == {f"write about {thing} in {place}" for thing in ("tea", "rain") for place in ("Kelby", "Vorn")}
    assert read(tmp_path, tasks=[{"name": "a", "prompts": ["a {thing}"]}]).material_needs(9) == {}


def task(**changes: Any) -> dict[str, Any]:
    return {"tasks": [FILE["tasks"][0] | changes]}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (task(shares=1), "Object contains unknown field `shares`"),
        ({"task": []}, "unknown field `task`"),
        ({"tasks": []}, "the mix is empty: give a task whose share is above 0"),
        (task(share=0), "the mix is empty"),
        (task(share=-1), "Expected `float` >= 0"),
        (task(prompts=[]), "Expected `array` of length >= 1"),
        (task(prompts=["a {tea}"]), "task 'sum up' names {tea}, which is neither a list nor a material"),
        (task(then=["a {tea}"]), "task 'sum up' names {tea}"),
        (task(prompts=["{passage}", "nothing"]), "task 'sum up': each of its prompts must name {passage}, or none"),
        (task(pieces=[3, 1]), r"task 'sum up': pieces are the fewest and the most, got [3, 1]"),
        (task(pieces=[0, 1]), "Expected `int` >= 1"),
        (task(turns=9), "Expected `int` <= 8"),
        (task(tokens=2), "Expected `int` >= 8"),
        (task(prompts=["{passage}" + "{topic}" * 9000]), "task 'sum up' can become"),
        ({"tasks": FILE["tasks"] * 2}, "two tasks are named 'sum up'"),
        ({"lists": {"thing": ["a {thing}"]}, "materials": []}, "list 'thing' is endless: {thing} -> {thing}"),
        ({"lists": {"a": ["{b}"], "b": ["x {c}"], "c": ["{a}"]}}, "endless: {a} -> {b} -> {c} -> {a}"),
        ({"lists": {f"a{n}": [f"{{a{n + 1}}}" * 10] for n in range(8)} | {"a8": ["x"]}}, "characters long; at most"),
        ({"lists": {"passage": ["x"], "topic": ["y"]}}, "'passage' is a list and a material"),
        ({"lists": {"topic": ["{passage}"]}}, "list 'topic' names {passage}, which is no list"),
        ({"materials": FILE["materials"] * 2}, "two materials are named 'passage'"),
        ({"materials": [{"name": "b", "prompts": ["{passage}"]}]}, "material 'b' names {passage}, which is no list"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, changes: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as error:
        read(tmp_path, **changes)
    text = str(error.value)
    assert text.startswith(str(tmp_path / "tasks.json")) and "\n" not in text
    assert line.replace("`", "") in text


def test_two_materials_in_a_task(tmp_path: Path) -> None:
    both = [{"name": name, "prompts": ["x"]} for name in ("passage", "program")]
    with pytest.raises(InputError, match="names two materials, 'passage' and 'program': a task has one"):
        read(tmp_path, materials=both, **task(prompts=["{passage} {program}"]))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"gone\.json do not exist; leave out --templates for those that ship"):
        Templates.read(tmp_path / "gone.json")


def test_those_that_ship() -> None:
    templates = Templates.read(SHIPPED)
    texts = {material.name: [f"text {number}" for number in range(12)] for material in templates.materials}
    prompts = [templates.prompt(0, index, texts) for index in range(3000)]
    assert {prompt.task for prompt in prompts} == set(range(len(templates.tasks)))
    assert len({prompt.text for prompt in prompts}) > 2500
    assert any(len(prompt.then) > 1 for prompt in prompts)
