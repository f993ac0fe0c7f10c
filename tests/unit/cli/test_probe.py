"""`blockpilot probe` around a pretended engine: what it asks for, what it prints, its exit codes."""

import json
from types import SimpleNamespace

import pytest

from blockpilot.cli.main import main
from blockpilot.core import device
from blockpilot.cpu.tokens import Tokens
from blockpilot.decoding.probe import Counts, ProbeReport
from blockpilot.decoding.probe_passes import Difference
from blockpilot.engine import llm as llm_module
from blockpilot.models import loading
from blockpilot.models.weights import save_decoder_folder
from tests.tiny import make_decoder, make_tokenizer

KEYS = ["target", "device", "dtype", "seed", "exact", "num_cases", "num_rows", "num_differing", "num_not_finite"]
KEYS += ["seconds", "kinds", "difference"]
SAME = ProbeReport({"prompt cuts": Counts(3, 420, 0), "trees": Counts(5, 7000, 0)}, 1.5, None, 0)
DIFFERENCE = Difference("layer 3, attention", "tree of 16 tokens, 1 request, start 300", 5)
OTHER = ProbeReport({"prompt cuts": Counts(3, 420, 0), "trees": Counts(5, 7000, 2)}, 1.5, DIFFERENCE, 7)


@pytest.fixture
def made(monkeypatch):
    """What engines were asked for; the last of it is the report to give."""
    asked: list = []

    class FakeLLM:
        def __init__(self, target, *, drafter, pilot, config):
            self.target_name, self.config = target.name, config
            asked.append((drafter, pilot, config))

        def probe(self, report, *, seed):
            report("trees", 1, 1)
            return found[-1]

    found = [SAME]
    target = SimpleNamespace(name="tiny", decoder=SimpleNamespace(config=SimpleNamespace(context_length=1024)))
    monkeypatch.setattr(llm_module, "LLM", FakeLLM)
    monkeypatch.setattr(loading, "load_target", lambda *given, **options: target)
    monkeypatch.setattr(device, "resolve_device", lambda name: None)
    return SimpleNamespace(asked=asked, found=found)


def test_a_cpu_is_refused_before_anything_is_loaded(capsys, monkeypatch):
    monkeypatch.setattr(loading, "load_target", lambda *given: pytest.fail("loaded"))
    assert main(["probe", "--target", "no-such-model", "--dtype", "bfloat16"]) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "bfloat16 on a CPU has no exact path" in output.err and "--dtype int8" in output.err


def test_the_same_bits(made, capsys):
    assert main(["probe", "--device", "cuda", "--target", "tiny", "--batch-size", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["what", "cases", "rows", "differing"]
    assert lines[2].split() == ["trees", "5", "7,000", "0"]
    assert lines[-1] == "7,420 logit rows, bit for bit the same"
    ((drafter, pilot, config),) = made.asked
    assert drafter is None and pilot == "ar" and config.dtype == "bfloat16"
    assert config.num_slots == 5 and config.context_length == 1024  # the target's, which is shorter


def test_other_bits(made, capsys):
    made.found.append(OTHER)
    assert main(["probe", "--device", "cuda"]) == 1
    output = capsys.readouterr()
    assert output.out.splitlines()[-1] == f"2 of 7,420 rows differ. First: {DIFFERENCE}"
    assert "7 plain rows hold infinities" in output.err


def test_json_is_one_object(made, capsys):
    made.found.append(OTHER)
    assert main(["probe", "--device", "cuda", "--json", "--seed", "3"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert list(value) == KEYS
    assert value["target"] == "tiny" and value["seed"] == 3 and value["exact"] is False
    assert value["kinds"]["trees"] == {"cases": 5, "rows": 7000, "differing": 2}
    assert value["difference"] == {"operation": "layer 3, attention", "shape": DIFFERENCE.shape, "token": 5}


@pytest.fixture
def folder(tmp_path, model_cache):
    """A tiny model of shapes that run in 8-bit integers."""
    save_decoder_folder(make_decoder("qwen3-int8"), tmp_path / "tiny")
    make_tokenizer().save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def test_a_folder_packed_to_8_bits_on_a_cpu(folder, capsys):
    words = ["probe", "--target", folder, "--quantize", "q8_0", "--batch-size", "3"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == ["prompt", "chains", "trees", "batches"]
    assert lines[-1].endswith("logit rows, bit for bit the same")
    assert main([*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert (value["device"], value["dtype"], value["exact"], value["difference"]) == ("cpu", "int8", True, None)


def test_a_planted_fault_on_a_cpu(folder, capsys, monkeypatch):
    add_chain = Tokens.add_chain

    def add(self, slot, start, token_ids):
        add_chain(self, slot, start, token_ids)
        self.positions[-1] += len(token_ids) > 1

    monkeypatch.setattr(Tokens, "add_chain", add)
    assert main(["probe", "--target", folder, "--quantize", "q8_0", "--batch-size", "1"]) == 1
    assert "First: layer 0 (chain of 5 tokens, 1 request, start 1): token 4" in capsys.readouterr().out


def test_a_target_in_float32_is_refused_when_it_is_known(folder, capsys):
    assert main(["probe", "--target", folder]) == 2
    assert "float32 on a CPU has no exact path" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--batch-size", "0"], "--batch-size must be at least 1"), (["--device", "tpu"], "unknown device")],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert main(["probe", *words]) == 2
    assert message in capsys.readouterr().err
