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


@pytest.mark.parametrize(
    ("line", "message"), [("{", "line 1: not valid JSON"), (json.dumps({"task": "x"}), "line 1: not an answer")]
)
def test_other_damage_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "answers.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        AnswersFile(path)
