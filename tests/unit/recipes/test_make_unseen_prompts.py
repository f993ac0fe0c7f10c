"""Eight kinds, eight prompts each; nothing of them is in what we train or calibrate with."""

import gzip
from pathlib import Path

import make_unseen_prompts
import pytest

from blockpilot.core.reading import decode_json
from blockpilot.text.prompts import read_prompts

ASSETS = Path(make_unseen_prompts.__file__).parents[1] / "src" / "blockpilot" / "assets"


def test_every_kind_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_unseen_prompts.py", "--out", str(tmp_path)])
    assert make_unseen_prompts.main() == 0
    files = sorted(tmp_path.iterdir())
    assert len(files) == 8
    for file in files:
        prompts = read_prompts(file)
        assert len(prompts) == 8 and all("{" not in prompt.turns[0].split("JSON")[0] for prompt in prompts)
    passages = decode_json(make_unseen_prompts.SOURCE.read_bytes(), dict, "")["passages"]
    for place, prompt in enumerate(read_prompts(tmp_path / "retrieve.jsonl")):
        assert passages[place]["text"] in prompt.turns[0] and passages[place]["topic"] in prompt.turns[0]


def test_no_passage_is_among_the_prompts_that_ship() -> None:
    passages = decode_json(make_unseen_prompts.SOURCE.read_bytes(), dict, "")["passages"]
    shipped = "".join(gzip.decompress(file.read_bytes()).decode() for file in ASSETS.glob("prompts/*.jsonl.gz"))
    assert len(shipped) > 100_000 and not any(passage["text"][:40] in shipped for passage in passages)
