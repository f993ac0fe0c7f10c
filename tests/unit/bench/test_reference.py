"""Runs that are compared with the plain answers of an earlier one."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from blockpilot import LLM
from blockpilot.bench.reference import read_reference
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import InputError
from tests.unit.bench.pieces import QUIZ, SOURCE, TALK, run_tiny

Edit = Callable[[dict], None]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "one"
    run_tiny(folder, "ar,dflash:3", temperature=0.7)
    return folder


def copy_run(source: Path, out: Path, edit: Edit) -> Path:
    """The run with its answers edited."""
    out.mkdir()
    (out / "manifest.json").write_bytes((source / "manifest.json").read_bytes())
    lines = [json.loads(line) for line in (source / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        edit(line)
    (out / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return out


def spoil(line: dict) -> None:
    """Another token in the second turn of one plain answer."""
    if (line["method"], line["prompt_id"], line["turn"]) == ("ar", "t0", 1):
        line["token_ids"][2] += 1


def test_all_answers_are_compared_with_it(reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    same = run_tiny(tmp_path / "same", temperature=0.7, concurrency=2, reference=reference)
    assert all(row["mismatches"] == row["near_ties"] == 0 for row in same.rows)
    named = {"folder": "one", "manifest": read_reference(reference).manifest["id"]}
    assert named.items() <= same.manifest["reference"].items() and same.manifest["near_tie_gap"] == 1e-4
    spoiled = copy_run(reference, tmp_path / "spoiled", spoil)
    for is_exact in (False, True):
        monkeypatch.setattr(LLM, "is_exact", is_exact)
        if is_exact:  # such a run wants a reference of its kind
            with pytest.raises(InputError, match=r"near_tie_gap is 0\.0001 there and None here"):
                run_tiny(tmp_path / "no", temperature=0.7, reference=spoiled)
            manifest = json.loads((spoiled / "manifest.json").read_text(encoding="utf-8"))
            (spoiled / "manifest.json").write_text(json.dumps(manifest | {"near_tie_gap": None}), encoding="utf-8")
        found = run_tiny(tmp_path / f"other{is_exact}", temperature=0.7, reference=spoiled)
        counts = {(row["task"], row["method"]): row["mismatches"] for row in found.rows if row["task"] != "mean"}
        assert counts == {("quiz", "ar"): 0, ("quiz", "dflash:3"): 0, ("talk", "ar"): 1, ("talk", "dflash:3"): 1}
        lines = (tmp_path / f"other{is_exact}" / "differences.jsonl").read_text(encoding="utf-8").splitlines()
        (line,) = map(json.loads, lines)
        assert (line["prompt_id"], line["turn"], line["position"]) == ("t0", 1, 2)
        assert (line["gap"] is None) is is_exact and line["answers"] == {"ar": [0], "dflash:3": [0]}


def test_a_run_goes_on_with_the_same_reference_alone(reference: Path, tmp_path: Path) -> None:
    out, spoiled = tmp_path / "run", copy_run(reference, tmp_path / "one", spoil)
    for _ in range(2):
        run_tiny(out, temperature=0.7, reference=reference)
    for other in (None, spoiled):
        with pytest.raises(InputError, match="belongs to another run: reference"):
            run_tiny(out, temperature=0.7, reference=other)


def test_fewer_tasks_and_other_methods_may_be_compared(reference: Path, tmp_path: Path) -> None:
    result = run_tiny(tmp_path, "ar,tree:3", tasks=(TALK,), temperature=0.7, reference=reference)
    assert [row["mismatches"] for row in result.rows] == [0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": 0.0}, r"arguments\.temperature is 0\.7 there and 0\.0 here"),
        ({"seed": 3}, r"arguments\.seed is 0 there and 3 here"),
        ({"max_new_tokens": 9}, r"arguments\.max_new_tokens is 8 there and 9 here"),
        ({"num_prompts": 1}, r"prompts\.quiz\.num_prompts is 3 there and 1 here"),
        ({"tasks": (TaskPrompts("chess", QUIZ.prompts, (), SOURCE),)}, r"prompts\.chess\.file is None there"),
    ],
)
def test_another_run_is_refused(reference: Path, tmp_path: Path, settings: dict, message: str) -> None:
    with pytest.raises(InputError, match=f"--reference .*one is of another run: {message}"):
        run_tiny(tmp_path, reference=reference, **({"temperature": 0.7} | settings))


def test_runs_that_are_no_reference_are_named(reference: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no benchmark run"):
        read_reference(tmp_path)
    run_tiny(tmp_path / "two", "ar", concurrency=2)
    with pytest.raises(InputError, match=r"was measured with --concurrency 2: give a run with 1"):
        read_reference(tmp_path / "two")
    empty = copy_run(reference, tmp_path / "empty", lambda line: line.update(method="dflash:3"))
    with pytest.raises(InputError, match="has no answers of ar"):
        read_reference(empty)
    partial = copy_run(reference, tmp_path / "partial", lambda line: line.update(repeat=int(line["prompt_id"] == "t1")))
    with pytest.raises(InputError, match="lacks the plain answer to t1 of task talk: finish that run first"):
        run_tiny(tmp_path / "out", temperature=0.7, reference=partial)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ({"anchors": "every", "draft_sizes": []}, "holds traces of `blockpilot collect`, no results: give a folder of"),
        ({"config": {}}, "holds training text of `blockpilot synthesize`, no results"),
        ({"id": 3, "arguments": {}, "methods": {}}, r"manifest\.json: Expected str, got int, at id"),
        ({"id": "a", "arguments": 1, "methods": {}}, r"manifest\.json: Expected object, got int, at arguments"),
        ({"id": "a", "arguments": {"concurrency": "x" * 999}, "methods": {}}, "was measured with --concurrency 'xxx"),
        ({"id": "a", "arguments": {}, "methods": {}, "prompts": {"x": 1}}, "Expected object, got int, at prompts"),
        ([], "Expected object, got array"),
    ],
)
def test_manifests_that_are_no_reference_are_one_line(tmp_path: Path, manifest: object, message: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    with pytest.raises(InputError, match=message) as caught:
        read_reference(tmp_path)
    assert len(str(caught.value)) < 400


def test_tokens_that_the_target_cannot_have_said_are_named(reference: Path, tmp_path: Path) -> None:
    strange = copy_run(reference, tmp_path / "strange", lambda line: line.update(token_ids=[10**9]))
    with pytest.raises(InputError, match="holds token 1000000000, and this target knows"):
        run_tiny(tmp_path / "out", temperature=0.7, reference=strange)
