import argparse
import importlib.util

import pytest

from blockpilot.cli.main import main
from blockpilot.cli.profile import vllm_options
from blockpilot.models.export import public_drafter


def arguments(**options):
    values = {"target": "folder", "drafter": "smollm2-135m-dflash", "dtype": "float32", "engine_args": "{}"}
    return argparse.Namespace(**values | options)


def test_the_engine_gets_the_pair_and_the_users_own_arguments(monkeypatch, tmp_path):
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path))
    options = vllm_options(arguments(engine_args='{"enforce_eager": true, "max_num_seqs": 9}'), 4, 256)
    assert options["speculative_config"]["model"] == public_drafter("smollm2-135m-dflash")
    assert options["enforce_eager"] and options["max_num_seqs"] == 9 and options["max_model_len"] > 256
    assert options["additional_config"]["blockpilot"]  # the plugin is on, or nothing could be measured


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--contexts", "64,256"], "one context"),
        (["--drafter", "auto"], "--drafter"),
        (["--engine-args", "{"], "not valid JSON"),
        (["--engine-args", "[1]"], "JSON object"),
    ],
)
def test_bad_input_is_one_line(words, message, capsys):
    assert main(["profile", "--engine", "vllm", "--drafter", "some-folder", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed here")
def test_without_vllm_it_says_what_to_install(capsys):
    assert main(["profile", "--engine", "vllm", "--drafter", "some-folder"]) == 2
    assert "blockpilot[vllm]" in capsys.readouterr().err
