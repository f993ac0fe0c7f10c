"""Whole runs on tiny models: what is written, what goes on, what is refused."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from blockpilot.bench.answers import AnswersFile
from blockpilot.bench.config import CANDIDATES
from blockpilot.bench.measuring import Asker
from blockpilot.bench.methods import Method
from blockpilot.bench.plan import Round
from blockpilot.bench.run import run_bench
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.decoding.target import PassResult, TargetRunner
from blockpilot.pilots.files import save_pilot
from blockpilot.pilots.prefill import PrefillConfig, PrefillNetwork, PrefillPilot
from blockpilot.report.build import build_report
from blockpilot.text.prompts import Prompt
from tests.tiny import VOCAB_SIZE
from tests.unit.bench.pieces import QUIZ, SOURCE, TALK, ignore, make_setup, run_tiny


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_run_writes_answers_rows_samples_and_a_manifest(tmp_path: Path, model_cache: Path) -> None:
    tmp_path, num_frozen = tmp_path / "run", gc.get_freeze_count()
    result = run_tiny(tmp_path, "ar,ngram,dflash:3,best-fixed,step", repeats=2, num_prompts=2)
    assert gc.get_freeze_count() == num_frozen
    answers = AnswersFile(tmp_path / "answers.jsonl").answers
    assert len(answers) == 5 * 2 * (2 + 2 * 2)  # methods, repeats, quiz prompts and talk turns
    assert {answer.task for answer in answers[:5]} == {"quiz"}
    rows = read(tmp_path / "rows.jsonl")
    assert rows == result.rows and len(rows) == 3 * 5
    assert all(row["mismatches"] == row["near_ties"] == 0 for row in rows)
    assert read(tmp_path / "differences.jsonl") == []
    manifest = json.loads((tmp_path / "manifest.json").read_text(encoding="utf-8"))
    assert manifest["is_complete"] and {row["manifest"] for row in rows} == {manifest["id"]}
    assert {"arguments", "versions", "device", "dtype", "drafters", "sessions"} <= manifest.keys()
    assert manifest["sessions"][0]["step_costs"]["verify"]
    calibration = AnswersFile(tmp_path / "calibration.jsonl").answers
    assert {answer.prompt_id for answer in calibration} == {"c3"} and len(calibration) == 17
    assert manifest["best_fixed"]["size"] in range(2, 19)
    assert manifest["best_fixed"]["size_by_task"].keys() == {"quiz"}
    sizes = {size for a in answers if a.method == "best-fixed" for size in a.block_sizes}
    assert manifest["best_fixed"]["size"] in sizes
    samples = read(tmp_path / "samples.jsonl")
    first = next(a for a in answers if (a.task, a.prompt_id, a.method) == ("quiz", "q0", "ar"))
    assert "".join(samples[0]["pieces"]) == first.text and "dflash:3" in samples[0]["steps"]


def test_a_tree_is_chosen_as_a_size_is(tmp_path: Path, model_cache: Path) -> None:
    result = run_tiny(tmp_path, "ar,best-fixed,best-fixed-tree,auto")
    chosen = result.manifest["best_fixed_tree"]
    assert chosen["method"] in CANDIDATES["best-fixed-tree"] == tuple(chosen["tokens_per_second"])
    assert chosen["method_by_task"].keys() == {"quiz"} and result.manifest["best_fixed"]["size"] in range(2, 19)
    row = next(row for row in result.rows if row["method"] == "auto")
    assert row["over_best_fixed_tree"]["ratio"] > 0 and row["over_best_fixed"]["ratio"] > 0
    build_report([tmp_path], tmp_path / "report")
    text = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert f"| {chosen['method']} |" in text.replace("**", "") and "times best-fixed-tree" in text


def test_the_second_turn_answers_the_models_own_first_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_setup("ar", tasks=(TALK,))
    seen: list[str] = []
    tokenizer = setup.target.tokenizer
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda messages: seen.append(render(messages)) or seen[-1])
    run_bench(setup, tmp_path, ignore)
    first = next(a for a in AnswersFile(tmp_path / "answers.jsonl").answers if (a.prompt_id, a.turn) == ("t0", 0))
    assert first.text
    assert f"Q say it$Q {first.text}$Q again$A " in seen


def test_batches_give_the_answers_of_single_prompts(tmp_path: Path) -> None:
    tasks = (TaskPrompts("mixed", (*QUIZ.prompts, *TALK.prompts), (), SOURCE),)
    for many, folder in ((1, "one"), (4, "four")):
        run_tiny(tmp_path / folder, tasks=tasks, concurrency=many, temperature=0.7, seed=3)
    one, four = (
        {(a.prompt_id, a.turn, a.method): a.token_ids for a in AnswersFile(tmp_path / name / "answers.jsonl").answers}
        for name in ("one", "four")
    )
    assert one == four and len(one) == 14
    batches = [a.batch for a in AnswersFile(tmp_path / "four" / "answers.jsonl").answers if a.turn == 0]
    assert sorted(batches) == [0] * 8 + [1] * 2


def test_prompts_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    prefill = TargetRunner.prefill

    def watched(self: TargetRunner, chunks: Any, *others: Any) -> PassResult:
        sizes.append(sum(len(ids) for _, ids in chunks))
        return prefill(self, chunks, *others)

    monkeypatch.setattr(TargetRunner, "prefill", watched)
    run_tiny(tmp_path / "whole")
    assert max(sizes) > 4
    sizes.clear()
    result = run_tiny(tmp_path / "pieces", token_budget=4, reference=tmp_path / "whole")
    assert max(sizes) == 4 and all(row["mismatches"] == row["near_ties"] == 0 for row in result.rows)
    with pytest.raises(InputError, match=r"arguments\.token_budget is 4 there and 5 here"):
        run_tiny(tmp_path / "pieces", token_budget=5, reference=tmp_path / "whole")


def test_an_interrupted_run_goes_on_and_another_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, count = Asker.ask, 0

    def interrupted(self: Asker, work: Round, method: Method) -> list:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt
        return ask(self, work, method)

    monkeypatch.setattr(Asker, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_tiny(tmp_path)
    before = read(tmp_path / "answers.jsonl")
    assert before and not (tmp_path / "rows.jsonl").exists()
    with pytest.raises(InputError, match=r"belongs to another run: arguments.max_new_tokens is 8 there and 9 here"):
        run_tiny(tmp_path, max_new_tokens=9)
    calls: list[tuple] = []
    monkeypatch.setattr(Asker, "ask", lambda self, work, method: calls.append(work.key) or ask(self, work, method))
    run_tiny(tmp_path)
    after = read(tmp_path / "answers.jsonl")
    assert after[:6] == before[:6]  # two whole rounds were kept: a quiz prompt, and both turns of a talk
    assert ("quiz", 0, 0) not in calls and ("talk", 0, 0) not in calls and len(calls) == 2 * 3
    assert len({(a["task"], a["prompt_id"], a["turn"], a["method"]) for a in after}) == len(after) == 14
    files = [(path, path.read_bytes()) for path in sorted(tmp_path.glob("*.jsonl"))]
    calls.clear()
    run_tiny(tmp_path)  # nothing is left to do
    assert not calls and all(path.read_bytes() == content for path, content in files)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"holds other files \(\*\.jsonl\) and no manifest"):
        run_tiny(tmp_path)


def test_folders_that_somebody_changed_are_one_line(tmp_path: Path) -> None:
    run_tiny(tmp_path)
    path = tmp_path / "manifest.json"
    whole = json.loads(path.read_text(encoding="utf-8"))
    for changes, message in (
        ({"sessions": None}, r"manifest\.json: Expected array, got null, at sessions; choose another --out"),
        ({"sessions": [1]}, r"manifest\.json: Expected object, got int, at sessions\[0\]"),
        ({"anchors": "every", "draft_sizes": []}, "holds traces of `blockpilot collect`, no results: choose another"),
    ):
        path.write_text(json.dumps(whole | changes), encoding="utf-8")
        with pytest.raises(InputError, match=message):
            run_tiny(tmp_path)
    path.write_text(json.dumps(whole), encoding="utf-8")
    answers = read(tmp_path / "answers.jsonl")
    answers[0]["method"] = "magic"
    lines = "".join(json.dumps(answer) + "\n" for answer in answers)
    (tmp_path / "answers.jsonl").write_text(lines, encoding="utf-8")
    with pytest.raises(InputError, match="holds answers that this run does not ask for: choose another --out"):
        run_tiny(tmp_path)


def test_a_task_that_does_not_fit_into_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = Asker.ask

    def short_of_memory(self: Asker, work: Round, method: Method) -> list:
        if work.task == "talk":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return ask(self, work, method)

    monkeypatch.setattr(Asker, "ask", short_of_memory)
    result = run_tiny(tmp_path)
    assert {row["task"] for row in result.rows} == {"quiz"}
    assert result.manifest["left_out_tasks"]["talk"].startswith("out of memory: CUDA out of memory")
    with pytest.raises(BlockPilotError, match="no task could be measured"):
        run_tiny(tmp_path / "other", tasks=(TALK,))
    monkeypatch.setattr(Asker, "ask", lambda *arguments: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        run_tiny(tmp_path / "third")


def test_the_papers_pilot_runs_from_its_folder(tmp_path: Path) -> None:
    network = PrefillNetwork(PrefillConfig(input_size=VOCAB_SIZE, sizes=(3, 5), hidden_size=8))
    save_pilot(tmp_path / "pilot", PrefillPilot(network), target="tiny", drafter="dflash", training={})
    result = run_tiny(tmp_path / "run", "ar,blockpilot", pilot_folder=tmp_path / "pilot")
    assert result.manifest["methods"]["blockpilot"]["pilot"] == "prefill:pilot"
    sizes = {int(size) for row in result.rows[1:4:2] for size in row["block_size_histogram"]}
    assert sizes & {3, 5} and sizes <= {1, 3, 5} and result.rows[1]["mismatches"] == 0


def test_the_order_of_methods_changes_from_round_to_round_but_not_from_run_to_run() -> None:
    methods = make_setup("ar,ngram,dflash:3,dflash:4,tree:3").methods
    rounds = [Round("quiz", batch, 0, (), 0) for batch in range(8)]
    orders = [tuple(method.name for method in work.shuffle(methods, 1)) for work in rounds]
    assert len(set(orders)) > 4
    assert orders == [tuple(method.name for method in work.shuffle(methods, 1)) for work in rounds]


def test_prompts_that_do_not_fit_are_passed_over(tmp_path: Path) -> None:
    long = Prompt("long", "many words " * 40)
    result = run_tiny(tmp_path, "ar", tasks=(TaskPrompts("quiz", (long, *QUIZ.prompts), (), SOURCE),), num_prompts=2)
    assert result.manifest["prompts_too_long"] == {"quiz": 1} and result.rows[0]["num_prompts"] == 2
    with pytest.raises(InputError, match="no prompt fits a context of 160 tokens"):
        run_tiny(tmp_path / "other", "ar", tasks=(TaskPrompts("quiz", (long,), (), SOURCE),))
    with pytest.raises(InputError, match="these files hold none that fits"):
        run_tiny(tmp_path / "third", "ar,best-fixed", tasks=(TALK,))
