"""The pilot on kinds that it was not fitted to: constants are chosen on one half and judged on the other."""

import json
from pathlib import Path

import numpy as np
import pytest
import unseen_kinds
from unseen_kinds import compare, machines

from blockpilot.cli.main import main
from blockpilot.models.dflash_format import save_dflash
from tests.tiny import make_dflash
from tests.unit.training.pieces import save_target


def test_the_best_constant_is_chosen_on_the_other_half() -> None:
    first, second = (10.0, 1.0), (10.0, 2.0)
    found = compare(
        [(10.0, 1.0)] * 6, {"ar": [(10.0, 4.0)] * 6, "odd": [first, second] * 3, "even": [second, first] * 3}
    )
    assert found["best"] == ["even", "odd"], "each half takes what was best on the other, and loses by it"
    assert found["ratio"] == pytest.approx(2) and found["over_plain"] == pytest.approx(4)
    assert found["ci"] == pytest.approx([2, 2]) and found["num_answers"] == 6


def test_imagined_machines_are_what_they_are_called() -> None:
    flat, steep, stepped, small = machines().values()
    assert flat.verify_ms(64) == flat.verify_ms(1) and steep.verify_ms(11) == pytest.approx(2)
    assert stepped.verify_ms(5) == stepped.verify_ms(16) > stepped.verify_ms(4) == stepped.verify_ms(2)
    assert np.diff(small.verify_row(64)).min() > 0


def test_every_kind_is_left_out_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_target(tmp_path / "target")
    save_dflash(make_dflash(is_second=True), tmp_path / "drafter")
    for kind in ("sums", "talks"):
        lines = [json.dumps({"id": f"{kind}{place}", "prompt": f"what is {place}"}) for place in range(6)]
        (tmp_path / f"{kind}.jsonl").write_text("\n".join(lines), encoding="utf-8")
    words = ["collect", "--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter"), "--prompts"]
    words += [str(tmp_path / "sums.jsonl"), str(tmp_path / "talks.jsonl"), "--sizes", "2-16", "--draft-sizes", "4,8,16"]
    for name, temperature in (("t0", "0"), ("t1", "1")):
        out = ["--max-new-tokens", "24", "--temperature", temperature, "--out", str(tmp_path / name)]
        assert main([*words, *out]) == 0
    capsys.readouterr()
    monkeypatch.setattr(
        "sys.argv", ["unseen_kinds.py", "--json", "--traces", str(tmp_path / "t0"), str(tmp_path / "t1")]
    )
    assert unseen_kinds.main() == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 2 * 2 * 4 + 2 * 4  # kinds, temperatures, machines; their means
    assert {row["kind"] for row in rows} == {"sums", "talks", "mean"} and all(row["ratio"] > 0 for row in rows)
    monkeypatch.setattr("sys.argv", ["unseen_kinds.py", "--traces", str(tmp_path / "nothing")])
    assert unseen_kinds.main() == 2 and "holds no traces" in capsys.readouterr().err
