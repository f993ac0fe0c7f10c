"""Tau of a drafter on prompts that were given, alone and behind others."""

import json
from pathlib import Path

import drafter_tau
import pytest
from drafter_tau import put_behind_others

from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash
from tests.unit.training.pieces import chat_target, save_target

PROMPTS = ["what is a", "and what is b", "who is c", "why d"]


def test_a_prompt_stands_behind_as_many_others_as_fit() -> None:
    target = chat_target()
    alone = put_behind_others(target, PROMPTS, 2, 0)
    assert alone == [target.tokenizer.encode_chat(prompt) for prompt in PROMPTS[:2]]
    longer = put_behind_others(target, PROMPTS, 2, 40)
    texts = [target.tokenizer.decode(ids) for ids in longer]
    assert all(len(one) < len(other) <= 40 for one, other in zip(alone, longer, strict=True))
    assert all(prompt in text for prompt, text in zip(PROMPTS, texts, strict=False))
    everything = target.tokenizer.decode(put_behind_others(target, PROMPTS, 1, 10_000)[0])
    places = [everything.index(prompt) for prompt in (*PROMPTS[:0:-1], PROMPTS[0])]
    assert places == sorted(places), "the one that is asked stands last"


def test_rows_by_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target = save_target(tmp_path / "target")
    save_dflash(make_dflash(is_second=True), tmp_path / "drafter")
    (tmp_path / "kind.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    words = ["--target", str(target), "--drafter", str(tmp_path / "drafter"), "--prompts", str(tmp_path / "kind.jsonl")]
    words += ["--max-new-tokens", "20", "--block-sizes", "8", "--contexts", "0,48"]
    monkeypatch.setattr("sys.argv", ["drafter_tau.py", *words])
    drafter_tau.main()
    spoken = capsys.readouterr()
    rows = [json.loads(line) for line in spoken.out.splitlines()]
    assert [(row["task"], row["context"], row["num_prompts"]) for row in rows] == [("kind", 0, 4), ("kind", 48, 4)]
    assert all(row["tau_loop_free"] >= 1 for row in rows) and rows[1]["mean_prompt"] > rows[0]["mean_prompt"]
    assert "context 48: mean tau_loop_free" in spoken.err
