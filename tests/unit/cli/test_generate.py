"""`blockpilot generate` around a pretended engine: what goes in, what comes out on which stream."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from blockpilot.cli.main import main
from blockpilot.core.records import Completion, StepRecord
from blockpilot.engine import llm as llm_module
from blockpilot.models.shipped import default_drafter

KEYS = [
    "text",
    "token_ids",
    "num_prompt_tokens",
    "num_tokens",
    "num_steps",
    "tau",
    "block_sizes",
    "verify_sizes",
    "emitted",
    "prefill_seconds",
    "decode_seconds",
    "pilot_seconds",
    "tokens_per_second",
    "finish_reason",
    "pilot",
    "target",
    "drafter",
    "device",
    "dtype",
    "exact",
    "seed",
]


class FakeLLM:
    """Says a fixed answer in pieces; an exception among the pieces is raised there."""

    pieces: tuple[str | BaseException, ...] = ("Hello", ", wörld")
    emitted: tuple[int, ...] = (3, 1)
    made: list["FakeLLM"]
    is_exact = True

    def __init__(self, target, *, drafter, pilot, config, costs, progress):
        self.target_name, self.config, self.costs = target, config, costs
        name = default_drafter(target) if drafter == "auto" else drafter
        self.drafter = SimpleNamespace(name=name) if name != "none" else None
        self.pilot = SimpleNamespace(name="ar" if pilot == "auto" else pilot)
        self.is_closed = False
        self.made.append(self)

    def stream(self, prompt, params, *, is_raw):
        self.prompt, self.params, self.is_raw = prompt, params, is_raw
        try:
            for piece in self.pieces:
                if isinstance(piece, BaseException):
                    raise piece
                yield SimpleNamespace(new_text=piece, completion=None)
            yield SimpleNamespace(new_text="", completion=self.completion())
        finally:
            self.is_closed = True

    def completion(self):
        seconds = {"draft_seconds": 0.1, "verify_seconds": 0.2, "pilot_seconds": 0.25}
        return Completion(
            text="".join(piece for piece in self.pieces if isinstance(piece, str)),
            token_ids=list(range(1 + sum(self.emitted))),
            num_prompt_tokens=7,
            finish_reason="length",
            prefill_seconds=0.5,
            decode_seconds=2.0,
            steps=[StepRecord(block_size=4, verify_size=4, emitted=emitted, **seconds) for emitted in self.emitted],
        )


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    class Fake(FakeLLM):
        made: list[FakeLLM] = []  # noqa: RUF012 - one list per test

    monkeypatch.setattr(llm_module, "LLM", Fake)
    return Fake


def test_json_has_exactly_the_documented_keys(capsys):
    assert main(["generate", "Hi", "--json", "--drafter", "ngram", "--pilot", "fixed:4", "--seed", "5"]) == 0
    output = capsys.readouterr()
    result = json.loads(output.out)
    assert list(result) == KEYS
    assert output.err == ""
    assert result["num_tokens"] == 1 + sum(result["emitted"]) == 5
    assert (result["num_steps"], result["tau"], result["tokens_per_second"]) == (2, 2.0, 2.0)
    assert (result["block_sizes"], result["verify_sizes"], result["emitted"]) == ([4, 4], [4, 4], [3, 1])
    assert (result["pilot"], result["drafter"], result["exact"], result["seed"]) == ("fixed:4", "ngram", True, 5)
    assert result["text"] == "Hello, wörld"


def test_json_without_steps_has_null_rates(fake_llm, capsys):
    fake_llm.emitted = ()
    assert main(["generate", "Hi", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["num_tokens"], result["tau"], result["tokens_per_second"]) == (1, None, None)
    assert (result["pilot"], result["drafter"], result["target"]) == ("ar", "smollm2-135m-dflash2", "smollm2-135m")


def test_human_mode_keeps_the_answer_alone_on_stdout(capsys):
    assert main(["generate", "Hi", "--target", "some/model"]) == 0
    output = capsys.readouterr()
    assert output.out == "Hello, wörld\n"
    assert "no drafter ships for some/model: text that repeats is drafted by n-gram lookup" in output.err
    assert all(word in output.err for word in ("tokens/s", "tau", "prefill", "length", "2.00"))


def test_human_mode_without_steps_shows_dashes(fake_llm, capsys):
    fake_llm.emitted, fake_llm.pieces = (), ("Hi\n",)
    assert main(["generate", "Hi"]) == 0
    output = capsys.readouterr()
    assert output.out == "Hi\n"
    assert " - " in output.err


@pytest.mark.parametrize("words", [["--pilot", "ar"], ["--drafter", "ngram"], ["--drafter", "none"], ["--json"]])
def test_no_note_when_the_choice_was_explicit(words, capsys):
    assert main(["generate", "Hi", "--target", "some/model", *words]) == 0
    assert "no drafter" not in capsys.readouterr().err


def test_flags_reach_the_engine(fake_llm):
    flags = "--max-new-tokens 9 --temperature 0.5 --top-p 0.9 --top-k 3 --seed 2 --stop a --stop b --raw"
    flags += " --dtype bfloat16 --context-length 99 --profile costs.json"
    assert main(["generate", "Hi", *flags.split()]) == 0
    (made,) = fake_llm.made
    assert made.costs == Path("costs.json")
    params = made.params
    assert (params.max_new_tokens, params.temperature, params.top_p, params.top_k) == (9, 0.5, 0.9, 3)
    assert (params.seed, params.stop, made.is_raw) == (2, ("a", "b"), True)
    assert (made.config.dtype, made.config.context_length, made.config.num_slots) == ("bfloat16", 99, 1)


def test_a_format_to_quantize_to_reaches_the_engine(fake_llm):
    assert main(["generate", "Hi", "--quantize", "q8_0"]) == 0
    assert main(["generate", "Hi", "--dtype", "int8"]) == 0
    assert [(made.config.dtype, made.config.quantize) for made in fake_llm.made] == [("auto", "q8_0"), ("int8", None)]


@pytest.mark.parametrize(
    ("words", "dtype"), [([], "auto"), (["cuda"], "bfloat16"), (["cuda", "--dtype", "float16"], "float16")]
)
def test_the_dtype_suits_the_device(words, dtype, fake_llm):
    assert main(["generate", "Hi", *(["--device", *words] if words else [])]) == 0
    assert fake_llm.made[0].config.dtype == dtype


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["Hi", "--max-new-tokens", "abc"], "--max-new-tokens"),
        (["Hi", "--max-new-tokens", "-1"], "max_new_tokens must be at least 1"),
        (["Hi", "--max-new-tokens", "1.5"], "--max-new-tokens"),
        (["Hi", "--temperature", "-1"], "temperature"),
        (["Hi", "--temperature", "nan"], "temperature"),
        (["Hi", "--top-p", "0"], "top_p"),
        (["Hi", "--top-k", "-1"], "top_k"),
        (["Hi", "--seed", "-1"], "seed"),
        (["Hi", "--stop", ""], "stop string is empty"),
        (["Hi", "--stop", "a\udcff"], "not valid UTF-8 at byte 1"),
        (["Hi", "--top-k=--"], "gives no value"),
        (["Hi", "--dtype", "int3"], "unknown dtype"),
        (["Hi", "--dtype", "int8", "--device", "cuda"], "dtype int8 runs on a CPU"),
        (["Hi", "--device", "mps"], "unknown device 'mps': use cpu or cuda"),
        (["Hi", "--context-length", "1"], "context_length"),
        (["Hi", "--pilot", "nope"], "unknown pilot"),
        (["Hi", "--pilot", "fixed:0"], "fixed:0"),
        (["Hi", "--pilot", "fixed:4", "--drafter", "none"], "needs a drafter: add --drafter ngram"),
        (["Hi", "--max-new", "4"], "unrecognized arguments"),
        ([" \n"], "the prompt is empty"),
        (["ä\udcffb"], "not valid UTF-8 at byte 2"),
    ],
)
def test_bad_input_is_found_before_the_model_is_loaded(words, expected, fake_llm, capsys):
    assert main(["generate", *words]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert expected in output.err
    assert output.err.count("\n") == 1
    assert fake_llm.made == []


@pytest.mark.parametrize(
    ("data", "prompt"),
    [(b"Hi\n", "Hi"), (b"Hi\r\n", "Hi"), (b"Hi\n\n", "Hi\n"), ("grün".encode(), "grün"), (b" a\nb", " a\nb")],
)
def test_prompt_from_standard_input(data, prompt, fake_llm, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate", "-"]) == 0
    assert fake_llm.made[0].prompt == prompt


@pytest.mark.parametrize(
    ("data", "expected"), [(b"ab\xffc", "not valid UTF-8 at byte 2"), (b"", "prompt is empty"), (b"\n", "is empty")]
)
def test_bad_standard_input(data, expected, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert main(["generate", "-"]) == 2
    assert expected in capsys.readouterr().err


def test_closed_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["generate", "-"]) == 2
    assert "standard input is closed" in capsys.readouterr().err


def test_interrupt_finishes_the_line(fake_llm, capsys):
    fake_llm.pieces = ("Hel", KeyboardInterrupt())
    assert main(["generate", "Hi", "--pilot", "ar"]) == 130
    assert tuple(capsys.readouterr()) == ("Hel\n", "interrupted\n")
    assert fake_llm.made[0].is_closed


def test_interrupt_prints_no_half_json(fake_llm, capsys):
    fake_llm.pieces = ("Hel", KeyboardInterrupt())
    assert main(["generate", "Hi", "--json"]) == 130
    assert tuple(capsys.readouterr()) == ("", "interrupted\n")
