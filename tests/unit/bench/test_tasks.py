"""Prompt sets: what ships, what is read, what is refused."""

import json
from pathlib import Path

import pytest

from blockpilot.bench.tasks import SHIPPED, default_tasks, read_file, read_task
from blockpilot.core.errors import InputError

SHIPPED_TASKS = ("gsm8k", "math500", "humaneval", "mbpp", "swebench", "mt_bench")


def test_shipped_subsets_hold_enough_and_may_be_shipped() -> None:
    assert default_tasks(None) == SHIPPED_TASKS
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 1_000_000
    notice = (SHIPPED / "NOTICE.md").read_text(encoding="utf-8")
    for name in SHIPPED_TASKS:
        task = read_task(name, data=None, split="test")
        assert len(task.prompts) >= 40 and len(task.calibration) >= 8, name
        assert not {p.id for p in task.prompts} & {p.id for p in task.calibration}
        assert f"{name}.jsonl.gz" in notice
        needed = {"humaneval": "entry_point", "mbpp": "test_list"}.get(name)
        assert all(prompt.answer if name in ("gsm8k", "math500") else True for prompt in task.prompts)
        assert all(needed in prompt.meta for prompt in task.prompts) if needed else True
    assert all(len(prompt.turns) == 2 for prompt in read_task("mt_bench", data=None, split="all").prompts)
    for name in ("aime24", "alpaca"):
        with pytest.raises(InputError, match=f"task {name} does not ship because of its licence: give --data"):
            read_task(name, data=None, split="test")


def test_unknown_task_and_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown task 'gsm9k'; known: gsm8k, math500, .*alpaca"):
        read_task("gsm9k", data=None, split="test")
    with pytest.raises(InputError, match=r"holds no gsm8k_test.jsonl.gz"):
        read_task("gsm8k", data=tmp_path, split="test")
    with pytest.raises(InputError, match="is no folder"):
        default_tasks(tmp_path / "nowhere")


def test_a_folder_of_whole_sets(tmp_path: Path) -> None:
    records = [{"id": f"a{place}", "turns": ["x"], "answer": place} for place in range(40)]
    (tmp_path / "aime24.jsonl").write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert default_tasks(tmp_path) == ("aime24",)
    task = read_task("aime24", data=tmp_path, split="all")
    assert len(task.prompts) == 40 and task.prompts[0].answer is not None
    digests = [prompt.digest for prompt in task.prompts]
    assert digests == sorted(digests)


def test_files_of_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a", "id": 1}\nnonsense\n{"prompt": "b", "id": 2}\n', encoding="utf-8")
    with pytest.raises(InputError, match=r"mine.jsonl, line 2: not valid JSON"):
        read_file(path, split="all")
    told: list[str] = []
    task = read_file(path, split="all", skip_bad=lambda error: told.append(str(error)))
    assert (task.name, len(task.prompts), len(told)) == ("mine", 2, 1)
    path.write_text('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', encoding="utf-8")
    with pytest.raises(InputError, match="two prompts have the id '1'"):
        read_file(path, split="all")
    one = tmp_path / "one.txt"
    one.write_text("hello\n", encoding="utf-8")
    split = "calibration" if not read_file(one, split="all").calibration else "test"
    with pytest.raises(InputError, match=f"has no {split} prompts .*: use --split all"):
        read_file(one, split=split)
