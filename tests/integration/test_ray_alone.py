"""Runs `test_ray.py` in a process of its own: its workers inherit what other tests have left in this one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

LEFT_BY_OTHERS = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PIP_NO_INDEX", "TOKENIZERS_PARALLELISM", "BLOCKPILOT_CACHE")


def test_in_a_process_of_its_own() -> None:
    root = Path(__file__).resolve().parents[2]
    kept = {name: value for name, value in os.environ.items() if name not in LEFT_BY_OTHERS}
    settings = {name: value for name, value in kept.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/integration/test_ray.py"]
    found = subprocess.run(
        command, cwd=root, env=settings | {"BLOCKPILOT_RAY_ALONE": "1"}, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, found.stdout[-5000:]
    assert "passed" in found.stdout or "skipped" in found.stdout
