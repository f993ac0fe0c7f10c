"""Prompt files: what is read, and which line is to blame."""

import gzip
import json
import lzma
import os
import threading
from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.text import prompts
from blockpilot.text.prompts import Prompt, read_prompts


def test_text_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\n\n  second \n")
    assert read_prompts(path) == [Prompt("a.txt:1", "first"), Prompt("a.txt:3", "second")]


@pytest.mark.parametrize(("suffix", "open_file"), [("", open), (".gz", gzip.open), (".xz", lzma.open)])
def test_json_lines_plain_and_compressed(tmp_path: Path, suffix: str, open_file) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    records = [{"id": 7, "turns": ["one", "two"]}, {"prompt": "three"}, {"turns": [" "], "question": "fünf"}]
    with open_file(path, "wb") as file:
        file.write("\n".join(map(json.dumps, records)).encode())
    found = read_prompts(path)
    assert [prompt.text for prompt in found] == ["one", "three", "fünf"]
    assert [prompt.id for prompt in found] == ["7", f"{path.name}:2", f"{path.name}:3"]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"\n \n", "a.txt is empty"),
        ("a.txt", b"good\nb\xffd\n", "a.txt, line 2: not UTF-8 text"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'\n{"answer": "x"}\n', "a.jsonl, line 2: no prompt found; expected a text under turns, prompt"),
        ("a.jsonl", b'["x"]', "a.jsonl, line 1: no prompt found"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "\\ud800"}', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", b'{"text": "x", "id": ["y"]}', "a.jsonl, line 1: an id is a text or a number"),
        ("a.jsonl", b'{"text": ' + b"[" * 100_000, "a.jsonl, line 1: not valid JSON .nested too deeply"),
        ("a.jsonl.gz", b"not gzip", "a.jsonl.gz cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}', mtime=0)[:-12] + b"\0" * 12, "a.jsonl.gz cannot be read"),
        ("a.txt.xz", b"not xz", "a.txt.xz cannot be read"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, name: str, content: bytes, line: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=line):
        read_prompts(tmp_path / name)


def test_turns_and_what_scoring_needs(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x", "turns": ["one", "two"], "answer": 4, "meta": {"level": 2}}\n', encoding="utf-8")
    (prompt,) = read_prompts(path)
    assert (prompt.turns, prompt.answer, prompt.meta) == (("one", "two"), "4", {"level": 2})


def test_bad_lines_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": \n\xff\n{"text": "y"}\n')
    told: list[str] = []
    assert [p.text for p in read_prompts(path, skip_bad=lambda error: told.append(str(error)))] == ["x", "y"]
    assert ["line 2" in told[0], "line 3" in told[1], len(told)] == [True, True, 2]


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.txt does not exist"):
        read_prompts(tmp_path / "nowhere.txt")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_prompts(tmp_path)


def test_files_without_an_end_are_refused_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(bytes(400 << 20)))
    for path in (tmp_path / "a.jsonl.gz", Path("/dev/zero")):
        with pytest.raises(InputError, match=r"line 1: longer than 16 MB.*; split the file into shorter lines"):
            read_prompts(path)
    monkeypatch.setattr(prompts, "MAX_LINES", 2)
    (tmp_path / "b.txt").write_text("y\n\n\n")
    with pytest.raises(InputError, match=r"b\.txt has more than 2 lines: split it into several files"):
        read_prompts(tmp_path / "b.txt")


def test_a_pipe_is_read_like_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b'{"text": "x", "id": null}\n{"text": "y"}\n',))
    writer.start()
    assert [prompt.id for prompt in read_prompts(path)] == ["a.jsonl:1", "a.jsonl:2"]
    writer.join()


def test_a_quarter_is_calibration() -> None:
    share = sum(Prompt(str(index), "x").is_calibration for index in range(1000)) / 1000
    assert 0.2 < share < 0.3
