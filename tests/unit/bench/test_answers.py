"""The file of answers: what survives a cut, and what is refused."""

import json
from pathlib import Path

import pytest

from blockpilot.bench.answers import AnswersFile
from blockpilot.core.errors import InputError
from tests.unit.bench.pieces import make_answer

ROUND = [make_answer([1]), make_answer([1], method="dflash:4")]
NEXT = [make_answer([1], batch=1), make_answer([1], method="dflash:4", batch=1)]
COUNTS = {("quiz", 0, 0): 2, ("quiz", 1, 0): 2}


def test_a_cut_line_costs_its_round_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([*ROUND, *NEXT])
    path.write_bytes(path.read_bytes()[:-20])
    again = AnswersFile(path)
    assert len(again.answers) == 3
    again.drop_incomplete(COUNTS)
    assert again.answers == ROUND
    again.append(NEXT)
    assert AnswersFile(path).answers == [*ROUND, *NEXT]


WRONG = {
    "line 2: Expected int, got str, at token_ids": {"token_ids": ["x"]},
    "line 2: Expected int >= 0, at token_ids": {"token_ids": [-1]},
    "line 2: Expected array of length >= 1, at token_ids": {"token_ids": []},
    "line 2: Expected int <= 65536, at block_sizes": {"block_sizes": [2**40]},
    "line 2: its steps have different lengths": {"emitted": [1, 1]},
    "line 2: Expected float >= 0.0, at decode_seconds": {"decode_seconds": -1.0},
    "line 2: Expected str, got null, at method": {"method": None},
    "line 2: not an answer of this version": {"speed": 1},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_wrong_value_names_line_and_field(tmp_path: Path, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append(ROUND)
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | WRONG[message])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        AnswersFile(path)


def test_what_is_no_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").symlink_to("/dev/zero")
    with pytest.raises(InputError, match="is no file: mend the line or choose another --out"):
        AnswersFile(tmp_path / "answers.jsonl")


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1: not valid JSON"), (json.dumps({"task": "x"}), "line 1: not an answer")]
)
def test_other_damage_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        AnswersFile(path)
