"""Reports of a small run: facts in the files, not pixels."""

import gzip
import html
import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from blockpilot.core.errors import InputError
from blockpilot.report.build import build_report
from blockpilot.report.figures.lengths import acceptance, count_best
from blockpilot.report.figures.speed import draw_speed_by_size
from blockpilot.report.figures.style import SHEET
from blockpilot.report.notes import write_notes
from blockpilot.report.run_data import read_run
from blockpilot.report.tables import details_table
from tests.unit.report.pieces import SPEEDS, make_row, write_run

FIGURES = ["speedups", "speed-by-size", "tau-by-size", "best-sizes", "acceptance", "time-split", "step-costs"]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    files = build_report([write_run(folder / "run")], folder / "out")
    assert [Path(path).stem for path in files["figures"]] == FIGURES and not files["left_out"]
    return folder / "out"


def test_the_page_stands_alone(report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    assert len(page) < 5_000_000
    assert page.count("<svg") == len(FIGURES) and page.count("<figcaption>") == len(FIGURES)
    assert not re.search(r"(?:src|href)=\"(?!#)|url\((?!#)|@import|<script", page)
    assert "@media print" in page


def test_the_page_says_what_was_measured(report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    for fact in (
        "GSM8K",
        "MT-Bench",
        "<b>1.75x</b>",
        "<b>3.25</b>",
        "A processor, 2 threads, float32",
        "small-drafter",
    ):
        assert fact in page
    for fact in ("Published, other models", "Qwen3-4B", "4.17x", "&#34;id&#34;: &#34;abc&#34;"):
        assert fact in page
    assert "<b>1.50x</b>" not in page  # only the best is bold


def test_markdown_has_the_same_table(report: Path) -> None:
    text = (report / "report.md").read_text(encoding="utf-8")
    assert "| Method | GSM8K Speedup | τ | MT-Bench Speedup | τ | Mean Speedup | τ |" in text
    assert "| auto | **1.75x** | 2.75 | **1.75x** | 2.75 | **1.75x** | 2.75 |" in text
    assert "![Acceptance by position](figures/acceptance.svg)" in text
    assert (report / "figures" / "acceptance.svg").is_file()


def test_the_same_run_gives_the_same_bytes(report: Path, tmp_path: Path) -> None:
    build_report([write_run(tmp_path / "run")], tmp_path / "out")
    for name in ("report.html", "report.md"):
        assert (tmp_path / "out" / name).read_bytes() == (report / name).read_bytes()


def test_notes_are_honest(tmp_path: Path) -> None:
    notes = "\n".join(write_notes(read_run(write_run(tmp_path / "a"))))
    assert "No mismatch with plain decoding" in notes
    assert "dflash:16 loses against plain decoding on GSM8K (0.70x), MT-Bench (0.70x)." in notes
    assert "ngram loses" in notes and "auto runs at 1.17 times best-fixed (1.12 to 1.22)." in notes
    assert "repeats itself (GSM8K 25%" in notes
    assert "2 prompts in the smallest task: with fewer than 64 a figure of one task is no claim." in notes
    rows = [make_row("gsm8k", "ar"), make_row("gsm8k", "auto", mismatches=1, near_ties=2, largest_gap=0.75)]
    rows.append(make_row("gsm8k", "ngram", speedup_ci=None))
    odd = {"task": "gsm8k", "answers": {"auto": [0]}, "prompt_id": "x", "position": 7, "is_near_tie": False}
    odd |= {"gap": 0.75}
    ties = [odd | {"is_near_tie": True, "gap": gap} for gap in (3e-5, 2e-5)]
    broken = "\n".join(write_notes(read_run(write_run(tmp_path / "b", rows, differences=[odd, *ties]))))
    assert "NOT LOSSLESS: 1 mismatch with plain decoding: GSM8K auto (x, token 7, gap 0.75)." in broken
    assert "2 near-ties" in broken and "largest gap 3e-05" in broken
    assert "not for certain: ngram on GSM8K (0.90x)" in broken


def test_notes_of_an_exact_engine_and_of_a_reference(tmp_path: Path) -> None:
    rows = [make_row("gsm8k", "ar", num_tokens=10), make_row("gsm8k", "auto", num_tokens=20)]
    arguments = {"concurrency": 16, "token_budget": 64}
    facts: dict[str, Any] = {"near_tie_gap": None, "reference": {"folder": "one"}, "arguments": arguments}
    run = read_run(write_run(tmp_path / "a", rows, **facts))
    assert run.title.endswith(", 16 requests at once, 64 prompt tokens per pass")
    notes = write_notes(run)
    assert "No mismatch with the plain answers of run one in 30 tokens." in notes
    assert any("so every difference counts as a mismatch" in note for note in notes)
    odd = {"task": "gsm8k", "answers": {"ar": [0]}, "prompt_id": "x", "position": 7, "gap": None, "is_near_tie": False}
    rows[0]["mismatches"] = 1
    notes = write_notes(read_run(write_run(tmp_path / "b", rows, differences=[odd], **facts)))
    assert "NOT LOSSLESS: 1 mismatch with the plain answers of run one: GSM8K ar (x, token 7)." in notes


def test_without_best_fixed_the_best_size_in_hindsight_is_named(tmp_path: Path) -> None:
    methods = ("ar", "dflash:4", "dflash:8", "auto")
    rows = [make_row("gsm8k", method, over_best_fixed=None) for method in methods]
    hindsight = "best-fixed was not measured; the best of the measured sizes in hindsight is dflash:4 (1.50x)"
    notes = write_notes(read_run(write_run(tmp_path / "new", rows)))
    assert f"{hindsight}, auto is at 1.75x, 1.17 times dflash:4 (1.12 to 1.22)." in notes
    rows[-1]["over_best_chain"]["ci"] = None
    assert "1.17 times dflash:4 (no interval)." in "\n".join(write_notes(read_run(write_run(tmp_path / "one", rows))))
    for row in rows:
        del row["over_best_chain"]  # as rows were before
    assert f"{hindsight}, auto is at 1.75x." in write_notes(read_run(write_run(tmp_path / "old", rows)))
    assert f"{hindsight}." in write_notes(read_run(write_run(tmp_path / "chains", rows[:-1])))


def test_seconds_to_the_first_token_are_shown_as_milliseconds(tmp_path: Path) -> None:
    rows = [make_row("gsm8k", "ar", time_to_first_token=0.0042)]
    table = details_table(read_run(write_run(tmp_path, rows)))
    assert table.rows[0][table.headings.index("First token, ms")].text == "4.2"


def legend_of(rows: list[dict[str, Any]], folder: Path) -> tuple[Figure, list[Text]]:
    with rc_context(fname=SHEET):
        figure = Figure(layout="constrained")
        draw_speed_by_size(read_run(write_run(folder, rows)), figure)
        FigureCanvasAgg(figure).draw()
    legend = figure.axes[0].get_legend()
    assert legend is not None
    return figure, legend.get_texts()


def test_all_other_methods_are_lines_across(tmp_path: Path) -> None:
    rows = [make_row("gsm8k", method) for method in SPEEDS]
    rows[0]["tokens_per_second"] = 19130.0
    texts = [text.get_text() for text in legend_of(rows, tmp_path)[1]]
    assert texts == [
        "fixed chain, dflash:B",
        "ar, 19,130",
        "auto, 70.0",
        "tree:15, 64.0",
        "best-fixed, 60.0",
        "eagle3-tree, 48.0",
        "ngram, 36.0",
    ]


def test_the_names_of_many_lines_stay_legible(tmp_path: Path) -> None:
    trees = [make_row("gsm8k", "tree:15") | {"method": f"tree:{size}"} for size in range(2, 30)]
    figure, texts = legend_of([make_row("gsm8k", method) for method in SPEEDS] + trees, tmp_path)
    boxes = [text.get_window_extent() for text in texts]
    assert all(above.y0 >= below.y1 for above, below in pairwise(boxes))
    assert boxes[0].y1 <= figure.bbox.y1 and boxes[-1].y0 >= figure.bbox.y0


def test_missing_data_leaves_a_sentence(tmp_path: Path) -> None:
    rows = [make_row("gsm8k", method) for method in ("ar", "dflash:4")]
    for row in rows:
        for name in ("positions", "milliseconds_per_step", "per_prompt"):
            del row[name]
    folder = write_run(tmp_path / "run", rows, sessions=[])
    (folder / "samples.jsonl").unlink()
    files = build_report([folder], tmp_path / "out")
    assert [Path(path).stem for path in files["figures"]] == ["speedups"] and len(files["left_out"]) == 6
    page = Path(files["html"]).read_text(encoding="utf-8")
    assert "it needs dflash:B for two block sizes or more" in page and "the run holds no sample" in page
    assert "Left out: Acceptance by position, because" in Path(files["markdown"]).read_text(encoding="utf-8")


def test_without_matplotlib_there_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    files = build_report([write_run(tmp_path / "run")], tmp_path / "out")
    assert not files["figures"] and "pip install" in files["left_out"][0]["reason"]
    assert "<b>1.75x</b>" in Path(files["html"]).read_text(encoding="utf-8")


def test_several_runs_make_several_sections(tmp_path: Path) -> None:
    hot = [make_row("gsm8k", method, temperature=0.7) for method in SPEEDS]
    files = build_report([write_run(tmp_path / "a"), write_run(tmp_path / "b", hot)], tmp_path / "out")
    page = Path(files["html"]).read_text(encoding="utf-8")
    assert "<h2>tiny, T = 0</h2>" in page and "<h2>tiny, T = 0.7</h2>" in page
    assert page.index("<h2>All runs</h2>") < page.index("<h2>tiny, T = 0</h2>")
    text = Path(files["markdown"]).read_text(encoding="utf-8")
    assert "| Run | Prompts | Plain, tokens/s | Best fixed size | Best method | auto | 95 % interval |" in text
    assert re.search(r"\| tiny, T = 0.7 \| \d+ \| [\d.,]+ \| dflash:\d+ [\d.]+x \| \S+ 1.75x \| 1.75x \|", text)
    assert {Path(path).stem for path in files["figures"]} == {f"{run}-{name}" for run in (1, 2) for name in FIGURES}


def test_tokens_of_a_step_stand_together(report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    shown = page[page.index("<details open><summary>auto: 6 tokens in 2 steps, 2.50 per step</summary>") :]
    drawn = shown.partition("</details>")[0]
    assert drawn.count("<i ") == 6 and drawn.count('class="own"') == 2 and drawn.count('class="step') == 2
    assert '<i class="first"' in drawn and "&lt;b&gt;" in drawn and ".↵\n" in drawn
    assert "step 1, position 2 of 3: accepted" in drawn
    assert "step 2: the target's own token; block size 4, 4 checked, 2 emitted" in drawn
    text = re.sub("<[^>]*>", "", drawn.partition("</summary>")[2])
    assert html.unescape(text).strip("\n") == "It is four.↵\nDone<b>"  # spaces between elements would be seen


def test_counts_behind_the_figures(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    assert count_best(run, "tau") == {16: 4} and count_best(run, "tokens_per_second") == {4: 4}
    assert acceptance(run.of_method("dflash:4")) == [0.5, 26 / 80, 0.25]


def test_rows_may_be_gzipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    plain = read_run(folder)
    for name in ("rows.jsonl", "differences.jsonl"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
    assert read_run(folder) == plain
    for damaged in ((folder / "rows.jsonl.gz").read_bytes()[:-9], b"no gzip"):
        (folder / "rows.jsonl.gz").write_bytes(damaged)
        with pytest.raises(InputError, match=r"rows\.jsonl\.gz cannot be read: "):
            read_run(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", None, "rows.jsonl cannot be read: No such file.*may not be finished"),
        ("rows.jsonl", "", "holds no rows"),
        ("rows.jsonl", "{\n", "line 1: not valid JSON"),
        ("rows.jsonl", json.dumps({"task": "x"}), "line 1: Object missing required field method"),
        ("manifest.json", "[]", "Expected object, got array"),
    ],
)
def test_bad_folders_are_named(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_run(folder)
    with pytest.raises(InputError, match="is no folder"):
        read_run(tmp_path / "nowhere")


def test_a_page_does_not_list_every_difference(tmp_path: Path) -> None:
    place = {"task": "gsm8k", "answers": {"auto": [0]}, "gap": 0.75, "is_near_tie": False}
    many = [place | {"prompt_id": "odd", "position": 3}] * 500
    rows = [make_row("gsm8k", "ar"), make_row("gsm8k", "auto", mismatches=500)]
    folder = write_run(tmp_path / "run", rows, differences=many)
    text = Path(build_report([folder], tmp_path / "out")["markdown"]).read_text(encoding="utf-8")
    assert text.count("odd, token 3, gap 0.75") == 8 and "is_near_tie" not in text
    assert '"device": "A processor"' in text
