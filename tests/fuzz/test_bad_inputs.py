"""A few of the bad inputs that `make fuzz` draws by the thousand."""

import subprocess
import sys

import pytest

from tests.fuzz.children import MOST_MEGABYTES, MOST_SECONDS, judge

COUNT = 60
PROGRAM = [sys.executable, "-m", "tests.fuzz.bad_inputs"]


def test_no_bad_input_ends_badly() -> None:
    words = ["--count", str(COUNT), "--seed", "1", "--processes", "1"]
    done = subprocess.run([*PROGRAM, *words], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{COUNT} inputs, seed 1: 0 faults" in done.stdout


@pytest.mark.parametrize(
    ("exit_code", "error", "seconds", "megabytes"),
    [
        (-11, "", 0, 0),
        (1, "blockpilot: error: unexpected KeyError: 'x' (run again with --debug to see where)\n", 0, 0),
        (2, "blockpilot: error: the file is bad (AttributeError: no x)\n", 0, 0),
        (2, "Traceback (most recent call last):\nblockpilot: error: x\n", 0, 0),
        (1, "blockpilot: error: the file is bad\n", 0, 0),
        (2, "usage: blockpilot\n", 0, 0),
        (2, "blockpilot: error: x\n", MOST_SECONDS + 1, 0),
        (0, "", 0, MOST_MEGABYTES + 1),
    ],
)
def test_bad_ends_are_noticed(exit_code: int, error: str, seconds: float, megabytes: float) -> None:
    assert judge(exit_code, error, seconds, megabytes)


def test_a_clear_line_is_a_good_end() -> None:
    assert not judge(2, "a note\nblockpilot: error: no such file: name another\n", 0.1, 10)
    assert not judge(0, "", 20, 10)
