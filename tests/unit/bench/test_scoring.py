"""Right and wrong results, and programs that misbehave."""

import time

import pytest

from blockpilot.bench.audit import Place
from blockpilot.bench.sandbox import passes
from blockpilot.bench.scoring import humaneval_program, is_right, mbpp_program, score
from blockpilot.text.prompts import Prompt
from tests.unit.bench.pieces import make_answer


@pytest.mark.parametrize(
    ("answer", "expected", "is_expected"),
    [
        (r"so \boxed{18} eggs, not 19", "18", True),
        (r"first \boxed{3}, then \boxed{\frac{1}{2}}", "0.5", True),
        (r"\boxed{\left( 3, \dfrac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", True),
        (r"\boxed{5\text{ cm}}", "5", True),
        (r"\boxed{\text{Evelyn}}", "Evelyn", True),
        ("It costs $1,234.00.", "1234", True),
        ("x = 7. The answer is -3", "-3", True),
        (r"\boxed{21}", "12", False),
        (r"\boxed{18", "18", True),  # cut off: the last number stands
        ("nothing", "0", False),
    ],
)
def test_results(answer: str, expected: str, is_expected: bool) -> None:
    assert is_right(answer, expected) == is_expected


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os\nwhile True: os.fork()",
        "x = []\nwhile True: x.append(bytearray(10**8))",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os._exit(0)",
        "raise SystemExit(0)",
        "assert False",
    ],
)
def test_a_program_that_does_not_reach_its_end_fails_in_time(program: str) -> None:
    started = time.monotonic()
    assert not passes(program, time_limit=1.0)
    assert time.monotonic() - started < 8


def test_a_program_that_does_passes() -> None:
    assert passes("from __future__ import annotations\nimport math, re, collections\nassert math.sqrt(4) == 2")


def test_programs_of_the_code_sets() -> None:
    head = "import math\n\n\ndef double(x):\n"
    meta = {
        "prompt": head + '    """Twice x."""\n',
        "entry_point": "double",
        "test": "def check(f):\n    assert f(math.floor(2.5)) == 4",
    }
    assert passes(humaneval_program("    return 2 * x\n", meta))  # a continuation
    assert passes(humaneval_program("Sure!\n```python\ndef double(x):\n    return 2 * x\n```\nDone.", meta))
    assert not passes(humaneval_program("```python\ndef double(x):\n    return x\n```", meta))
    tests = {"test_imports": ["import math"], "test_list": ["assert double(2) == 4", "assert double(math.pi) > 6"]}
    assert passes(mbpp_program("```\ndef double(x):\n    return x + x\n```", tests))


def test_only_what_can_be_scored_is() -> None:
    places = {
        ("gsm8k", "a"): Place(Prompt("a", "?", answer="4"), 0),
        ("gsm8k", "b"): Place(Prompt("b", "?"), 0),
        ("mbpp", "c"): Place(Prompt("c", "?", meta={"test_list": ["assert 1"]}), 0),
        ("talk", "d"): Place(Prompt("d", "?"), 0),
    }
    answers = [make_answer([1], task=task, prompt_id=prompt_id, text="4") for task, prompt_id in places]
    assert score(answers, places, is_code_scored=False) == {("gsm8k", "ar"): [True]}
    assert score(answers, places, is_code_scored=True)["mbpp", "ar"] == [True]
