"""The README's picture: every token in a box of its step, the target's own apart from drafted ones."""

import json
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import draw_answer
import pytest

TEXTS = ["def", " count", "(text", "):\n", "    return", " text", ".count(", '"<a>"', ")", ""]
EMITTED = [4, 1, 4]


def test_the_last_token_of_a_step_is_the_targets_own() -> None:
    tokens = draw_answer.mark_steps(TEXTS, EMITTED)
    assert [token.step for token in tokens] == [0, 1, 1, 1, 1, 2, 3, 3, 3, 3]
    assert [token.is_drafted for token in tokens] == [False, *[True] * 3, False, False, *[True] * 3, False]


def test_lines_break_between_words_and_lose_nothing_but_spaces() -> None:
    tokens = draw_answer.mark_steps(TEXTS, EMITTED)
    lines = draw_answer.split_lines(tokens, columns=12)
    written = ["".join(cell.letter for cell in line) for line in lines]
    assert max(len(line.rstrip()) for line in written) <= 12
    assert "".join(written).replace(" ", "") == "".join("".join(TEXTS).split())


def test_a_picture_is_one_small_valid_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"token_ids": list(range(len(TEXTS))), "emitted": EMITTED, "target": "a target", "pilot": "auto"}
    source, out = tmp_path / "answer.json", tmp_path / "answer.svg"
    source.write_text(json.dumps(answer))
    monkeypatch.setattr(draw_answer, "token_texts", lambda token_ids, target: TEXTS)
    monkeypatch.setattr(sys, "argv", ["draw_answer.py", "--answer", str(source), "--out", str(out)])
    draw_answer.main()
    picture = ElementTree.fromstring(out.read_text())
    words = "".join(picture.itertext())
    assert "BlockPilot: 3 steps" in words and "Plain decoding: 9 steps" in words
    assert "3.0 tokens per step" in words and '.count("<a>")' in words


def test_the_picture_that_ships_fetches_nothing() -> None:
    shipped = Path(draw_answer.__file__).parents[1] / "docs" / "figures" / "answer.svg"
    text = shipped.read_text()
    assert len(text) < 40_000
    assert "href" not in text and "<script" not in text and "url(" not in text
    ElementTree.fromstring(text)
