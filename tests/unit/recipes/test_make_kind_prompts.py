"""Eight kinds, eight prompts each; nothing of them is in what we train or calibrate with."""

import gzip
from pathlib import Path
from typing import Any

import make_kind_prompts
import pytest

from blockpilot.core.reading import decode_json
from blockpilot.text.prompts import read_prompts
from blockpilot.training.templates import SHIPPED

ASSETS = Path(make_kind_prompts.__file__).parents[1] / "src" / "blockpilot" / "assets"


KINDS = sorted(make_kind_prompts.UNSEEN.parent.glob("*_kinds.json"))
OWN_WORDS = ("spelling", "poem", "poet", "conversation between", "sql", "headline", "argument", "in the order", "quiz")


def read_kinds(path: Path) -> dict[str, Any]:
    kinds: dict[str, Any] = decode_json(path.read_bytes(), dict, "")
    return kinds


@pytest.mark.parametrize("kinds", KINDS, ids=lambda path: path.stem)
def test_every_kind_has_a_file(kinds: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_kind_prompts.py", "--out", str(tmp_path), "--kinds", str(kinds)])
    assert make_kind_prompts.main() == 0
    files = sorted(tmp_path.iterdir())
    assert {file.stem for file in files} == read_kinds(kinds)["kinds"].keys() and len(files) == 8
    for file in files:
        prompts = read_prompts(file)
        assert len(prompts) == 8 and all("{" not in prompt.turns[0].split("JSON")[0] for prompt in prompts)


def test_retrieval_names_a_passage_that_is_there() -> None:
    kinds = read_kinds(make_kind_prompts.UNSEEN.parent / "everyday_kinds.json")
    for passage, prompt in zip(kinds["passages"], make_kind_prompts.make_prompts(kinds)["retrieve"], strict=True):
        assert passage["text"] in prompt["prompt"] and passage["topic"] in prompt["prompt"]


@pytest.mark.parametrize("kinds", KINDS, ids=lambda path: path.stem)
def test_no_passage_is_in_what_ships(kinds: Path) -> None:
    shipped = "".join(gzip.decompress(file.read_bytes()).decode() for file in ASSETS.glob("prompts/*.jsonl.gz"))
    shipped += SHIPPED.read_text()
    passages = read_kinds(kinds)["passages"]
    assert len(shipped) > 100_000 and not any(passage["text"][:40] in shipped for passage in passages)


def test_no_template_is_of_an_unseen_kind() -> None:
    assert len(read_kinds(make_kind_prompts.UNSEEN)["kinds"]) == 8
    templates = SHIPPED.read_text().lower()
    assert "summarise" in templates and not [word for word in OWN_WORDS if word in templates]


def test_no_such_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["make_kind_prompts.py", "--out", str(tmp_path), "--kinds", "gone.json"])
    assert make_kind_prompts.main() == 2
    assert "gone.json" in capsys.readouterr().err
