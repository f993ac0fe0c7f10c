"""A run folder may come from anywhere: its words stay words, and what no report can be made of is one line."""

import gzip
import importlib.util
import time
import tracemalloc
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

from blockpilot.core.errors import InputError
from blockpilot.report.build import build_report
from blockpilot.report.markdown import escape_paragraph, escape_text, fence_for
from blockpilot.report.run_data import read_run
from tests.unit.report.hostile import HOSTILE, damaged_runs, poison, read_values, write_values, write_whole
from tests.unit.report.pieces import make_row, write_run

KNOWN = ("ar", "mean", "auto", "best-fixed", "dflash:4", "dflash:8", "dflash:16")  # names that a report looks for


class Parts(HTMLParser):
    """Tags with the names of their attributes, and the addresses they point to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[tuple[str, ...]] = Counter()
        self.addresses: set[str] = set()
        self.words = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        names = tuple(name for name, _ in attributes)
        self.tags[(tag, *names)] += 1
        self.addresses |= {str(value) for name, value in attributes if name in ("href", "src", "xlink:href")}

    def handle_comment(self, data: str) -> None:
        self.tags["comment",] += 1

    def handle_data(self, data: str) -> None:
        self.words += data


def parse_markdown(text: str) -> tuple[Counter[str], set[str]]:
    """What a page consists of, and the addresses in it."""
    kinds: Counter[str] = Counter()
    addresses = set()
    for block in MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(text):
        for token in (block, *(block.children or ())):
            kinds[token.type] += 1
            addresses |= {str(token.attrs[name]) for name in ("href", "src") if name in token.attrs}
    return kinds, addresses


@pytest.mark.parametrize("kept", [KNOWN, KNOWN[-3:]], ids=["values", "names"])
@pytest.mark.parametrize("words", HOSTILE)
def test_words_of_a_run_stay_words(tmp_path: Path, words: str, kept: tuple[str, ...]) -> None:
    honest = build_report([write_whole(tmp_path / "honest")], tmp_path / "a")
    run = poison(write_whole(tmp_path / f"evil `<evil>` {len(kept)}"), HOSTILE[words], lambda text: text in kept)
    files = build_report([run], tmp_path / "b")
    assert [Path(path).name for path in files["figures"]] == [Path(path).name for path in honest["figures"]]
    pages = [Parts(Path(one["html"]).read_text(encoding="utf-8")) for one in (honest, files)]
    assert set(pages[1].tags) <= set(pages[0].tags) and "evil" in pages[1].words
    assert all(address.startswith("#") for address in pages[1].addresses) and not pages[1].tags["comment",]
    texts = [Path(one["markdown"]).read_text(encoding="utf-8") for one in (honest, files)]
    (kinds, _), (found, addresses) = map(parse_markdown, texts)
    assert set(found) <= set(kinds) and not {kind for kind in found if kind.startswith(("html", "link", "code_"))}
    assert all(
        found[kind] <= kinds[kind] for kind in ("heading_open", "fence", "bullet_list_open", "image", "table_open")
    )
    assert all(address.startswith("figures/") for address in addresses)
    assert all(line.isprintable() for line in texts[1].splitlines())
    for path, other in zip(files["figures"], honest["figures"], strict=True):
        tags = [{one.tag for one in ElementTree.parse(name).iter()} for name in (path, other)]
        assert tags[0] <= tags[1] and "evil" not in Path(path).read_text(encoding="utf-8")


def test_every_damage_is_one_line_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    errors: list[str] = []
    for number, what in enumerate(damaged_runs(tmp_path / "run")):
        try:
            run = read_run(tmp_path / "run")
        except InputError as error:
            errors.append(str(error))
            continue
        if number % 5 == 0:  # writing pages takes time
            build_report([tmp_path / "run"], tmp_path / "out")
        assert run.title, what
    assert len(errors) > 300 and all("\n" not in error and ".json" in error for error in errors)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_prompts", -1, "line 2: Expected int >= 0, at num_prompts"),
        ("num_prompts", "5", "line 2: Expected int, got str, at num_prompts"),
        ("speedup_ci", [1.0], r"line 2: Expected array of length 2, at speedup_ci"),
        ("method", "dflash:x", "line 2: method 'dflash:x' names no block size"),
        ("positions", {"drafted": [1]}, "line 2: Object missing required field accepted, at positions"),
        ("tau_mean", 1e300, "line 2: Expected float <= .*, at tau_mean"),
    ],
)
def test_a_wrong_row_names_file_line_and_field(tmp_path: Path, field: str, value: object, message: str) -> None:
    rows = [make_row("gsm8k", "ar"), make_row("gsm8k", "auto") | {field: value}]
    with pytest.raises(InputError, match=rf"rows\.jsonl, {message}"):
        read_run(write_run(tmp_path, rows))


def test_wrong_samples_and_manifests_are_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (sample,) = read_values(folder / "samples.jsonl")
    sample["steps"]["auto"]["emitted"].append(1)
    write_values(folder / "samples.jsonl", [sample])
    with pytest.raises(InputError, match=r"samples\.jsonl, line 1: the columns of 'auto' have different lengths"):
        read_run(folder)
    for wrong, message in (
        ({"num_threads": "two"}, "Expected int, got str, at num_threads"),
        ({"sessions": [{"step_costs": 1}]}, r"at sessions\[0\]\.step_costs"),
    ):
        with pytest.raises(InputError, match=rf"manifest\.json: .*{message}"):
            read_run(write_run(tmp_path / "other", **wrong))
    nested: object = 1
    for _ in range(100):
        nested = [nested]
    with pytest.raises(InputError, match=r"manifest\.json: nested too deeply"):
        read_run(write_run(tmp_path / "deep", extra=nested))


def test_files_without_an_end_are_refused_early(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "rows.jsonl").unlink()
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(bytes(400 << 20), 1))
    started = time.perf_counter()
    tracemalloc.start()
    with pytest.raises(InputError, match=r"rows\.jsonl\.gz, line 1: longer than 16 MB"):
        read_run(folder)
    assert tracemalloc.get_traced_memory()[1] < 100 << 20 and time.perf_counter() - started < 3
    tracemalloc.stop()
    (folder / "rows.jsonl").symlink_to("/dev/zero")
    (folder / "rows.jsonl.gz").unlink()
    with pytest.raises(InputError, match=r"rows\.jsonl cannot be read: it is no file"):
        read_run(folder)


def test_a_folder_of_another_verb_is_named(tmp_path: Path) -> None:
    write_values(tmp_path / "manifest.json", [{"anchors": "every", "draft_sizes": []}])
    with pytest.raises(InputError, match="holds traces of `blockpilot collect`, no results: give a folder of"):
        read_run(tmp_path)


def test_too_many_names_are_refused(tmp_path: Path) -> None:
    rows = [make_row("gsm8k", "ar") | {"method": f"tree:{number}"} for number in range(100)]
    with pytest.raises(InputError, match="more than 64 methods"):
        read_run(write_run(tmp_path, rows))


def test_escaped_text_reads_as_before() -> None:
    assert escape_text("auto, 1.75x (a-b): 95 %") == "auto, 1.75x (a-b): 95 %"
    assert escape_text("a|b\n<i>`x`\\") == r"a&#124;b &#60;i&#62;\`x\`&#92;"
    assert escape_paragraph("1. x") == r"1\. x" and escape_paragraph("# x") == r"\# x"
    assert escape_paragraph("1.5B model") == "1.5B model" and escape_paragraph("---") == r"\---"
    assert (fence_for("x"), fence_for("a ```` b `")) == ("```", "`````")
