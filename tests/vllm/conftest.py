"""One engine serves most tests: vLLM with the plugin on, in this process, where its runner can be reached.

`make test-vllm` runs these in an environment of their own. Elsewhere, without vLLM, nothing is collected.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockpilot.integrations.vllm import costs
from blockpilot.models.export import export_drafter, export_target

HAS_VLLM = importlib.util.find_spec("vllm") is not None
collect_ignore_glob = [] if HAS_VLLM else ["test_*.py"]

DRAFTER = "smollm2-135m-dflash"
NUM_DRAFT_TOKENS = 15
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
if HAS_VLLM:
    os.environ.update(OFFLINE, VLLM_ENABLE_V1_MULTIPROCESSING="0")  # before it is imported


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_target("smollm2-135m", tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_drafter(DRAFTER, tmp_path_factory.mktemp("models") / DRAFTER)


@pytest.fixture(scope="session")
def ask_elsewhere(target_folder: Path, drafter_folder: Path) -> Callable[..., SimpleNamespace]:
    """Runs `answering.py` in a process of its own: answers, and what was printed."""

    def ask(*options: str, **environment: str) -> SimpleNamespace:
        script = Path(__file__).with_name("answering.py")
        command = [sys.executable, str(script), str(target_folder), str(drafter_folder), *options]
        ran = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        return SimpleNamespace(answers=json.loads(ran.stdout.splitlines()[-1]), log=ran.stderr + ran.stdout)

    return ask


@pytest.fixture(scope="session")
def plain_answers(ask_elsewhere: Callable[..., SimpleNamespace]) -> list[list[int]]:
    """vLLM's own greedy tokens for `answering.PROMPTS`, without speculation and without the plugin."""
    return ask_elsewhere("--plain").answers


@pytest.fixture(scope="session")
def engine(target_folder: Path, drafter_folder: Path) -> Any:
    """Prompts longer than 128 tokens are read in pieces; prefixes are cached in pages of 32; costs are assumed."""
    from tests.vllm.answering import make_llm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(costs, "costs_path", lambda key: target_folder / "no-costs.json")
        return make_llm(
            target_folder,
            drafter_folder,
            additional_config={"blockpilot": "chain-step"},
            max_num_batched_tokens=128,
            enable_prefix_caching=True,
            per_request_spec_decode_metrics="detailed",
        )


@pytest.fixture(scope="session")
def runner(engine: Any) -> Any:
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.fixture
def steering(runner: Any) -> Iterator[Any]:
    """What decides in the engine. A test may put another `load` in: the engine's own comes back."""
    steering = runner.propose_draft_token_ids.__self__.steering
    load = steering.load
    yield steering
    steering.load = load
    steering._reported.clear()


@pytest.fixture
def draft_sizes(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of every draft that vLLM's drafter makes."""
    sizes: list[int] = []
    propose = runner.drafter.propose

    def note(*args: Any, **options: Any) -> Any:
        sizes.append(options["num_speculative_tokens"])
        return propose(*args, **options)

    monkeypatch.setattr(runner.drafter, "propose", note)
    return sizes
