"""Methods by name, and the drafters they need."""

from pathlib import Path

import pytest

from blockpilot.bench.methods import DEFAULT_METHODS, choose_drafters, parse_methods
from blockpilot.core.errors import InputError


def parse(*names: str, device: str = "cpu", **options: Path) -> dict[str, tuple[str, str]]:
    methods = parse_methods(names, device=device, target="smollm2-135m", **options)
    return {method.name: (method.drafter, method.pilot) for method in methods}


def test_names_become_drafters_and_pilots() -> None:
    assert parse("auto", "dflash:8", "ngram", "eagle3:6", "eagle3-tree", "tree:7@4", "chain-step", "best-fixed") == {
        "ar": ("none", "ar"),
        "auto": ("dflash", "auto"),
        "dflash:8": ("dflash", "fixed:8"),
        "ngram": ("ngram", "fixed:4"),
        "eagle3:6": ("eagle3", "fixed:6"),
        "eagle3-tree": ("eagle3", "tree:6@4"),
        "tree:7@4": ("dflash", "tree:7@4"),
        "chain-step": ("dflash", "chain-step"),
        "best-fixed": ("dflash", ""),
    }
    assert parse("eagle3", device="cuda:0")["eagle3"] == ("eagle3", "fixed:8")


def test_one_pilot_under_two_names_is_measured_once() -> None:
    assert parse("step") == {"ar": ("none", "ar"), "step": ("dflash", "step")}
    assert parse("step", "auto") == parse("auto", "step") == parse("auto")
    assert "step" not in DEFAULT_METHODS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fast", "unknown method 'fast'; known: ar, ngram"),
        ("dflash", "unknown method 'dflash'"),
        ("dflash:99", "method 'dflash:99': the size must be a whole number from 1 to 64"),
        ("dflash:1", "a block of size 1 drafts nothing"),
        ("eagle3:17", "EAGLE-3 drafts blocks of up to 16"),
        ("tree:x", "method 'tree:x': the size"),
    ],
)
def test_errors(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(name)


def test_the_papers_pilot_must_be_there(model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blockpilot.replay.trace_files.ASSETS", model_cache)
    with pytest.raises(InputError, match=r"`blockpilot train-pilot --kind prefill --traces TR.*smollm2-135m-prefill`"):
        parse("blockpilot")
    (model_cache / "smollm2-135m-traces").mkdir(parents=True)
    (model_cache / "smollm2-135m-traces" / "manifest.json").write_text("{}")
    with pytest.raises(InputError, match=r"build it with `blockpilot train-pilot --kind prefill` \(minutes\)"):
        parse("blockpilot")


def test_drafters_ship_or_are_named() -> None:
    names = [name for name in DEFAULT_METHODS if name != "blockpilot"]
    methods = parse_methods(names, device="cpu", target="smollm2-135m")
    found = choose_drafters(methods, "smollm2-135m", {})
    assert (found["dflash"], found["eagle3"]) == ("smollm2-135m-dflash2", "smollm2-135m-eagle3")
    with pytest.raises(
        InputError, match=r"method 'eagle3' needs an EAGLE-3 drafter, and none ships for other: give --ea"
    ):
        choose_drafters(parse_methods(["eagle3"], device="cpu", target="other"), "other", {"eagle3": "auto"})
    assert choose_drafters(methods, "other", {"dflash": "here", "eagle3": "there"})["dflash"] == "here"
