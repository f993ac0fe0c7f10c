"""What is asked, in which order, and when."""

import gzip
import itertools
import math
from pathlib import Path

import pytest

from blockpilot.core.errors import InputError
from blockpilot.loadtest.prompts import Prompt, arrivals, draw, read_sources, require_texts


def texts(prompts: list[Prompt]) -> list[object]:
    return [prompt.messages[0]["content"] for prompt in prompts]


def test_arrivals_are_those_of_their_seed() -> None:
    assert arrivals(5.0, 50, 1) == arrivals(5.0, 50, 1) != arrivals(5.0, 50, 2)
    assert arrivals(5.0, 50, 1)[:10] == arrivals(5.0, 10, 1)
    assert arrivals(10.0, 50, 1) == pytest.approx([at / 2 for at in arrivals(5.0, 50, 1)])
    assert arrivals(math.inf, 3, 0) == [0, 0, 0]


def test_arrivals_are_a_poisson_process() -> None:
    times = arrivals(4.0, 20_001, 0)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times[0] == 0 and min(gaps) >= 0
    assert mean == pytest.approx(0.25, rel=0.03) and deviation == pytest.approx(0.25, rel=0.03)
    assert sum(gap > 0.5 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.06)


def test_prompts_come_in_a_seeded_order_and_again() -> None:
    prompts = [Prompt(str(number), ({"role": "user", "content": "x"},)) for number in range(7)]
    first = list(itertools.islice(draw(prompts, 3), 14))
    assert sorted(one.id for one in first[:7]) == [str(number) for number in range(7)]
    assert first[:7] == first[7:] and first[:7] != prompts
    assert list(itertools.islice(draw(prompts, 3), 14)) == first != list(itertools.islice(draw(prompts, 4), 14))


def test_tasks_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text('{"prompt": "three"}\n')
    found = read_sources(f"{tmp_path / 'a.txt'}, {tmp_path / 'b.jsonl'},mt_bench")
    assert texts(found)[:3] == ["one", "two", "three"] and len(found) > 10
    assert len({prompt.id for prompt in found}) == len(found)
    assert read_sources("mt_bench,mt_bench") == read_sources("mt_bench")


def test_conversations(tmp_path: Path) -> None:
    turns = '{"id": 7, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}\n\n'
    packed = tmp_path / "c.jsonl.gz"
    packed.write_bytes(gzip.compress((turns + '{"messages": [{"role": "user", "content": "v"}]}').encode()))
    found = read_sources(str(packed))
    assert [prompt.id for prompt in found] == ["7", "c.jsonl.gz:3"]
    assert [turn["role"] for turn in found[0].messages] == ["system", "user"]
    with pytest.raises(InputError, match=r"prompt '7' is a conversation"):
        require_texts(found)
    require_texts(found[1:])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"messages": []}', "line 1"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "x"}]}\n{"other": 1}', "line 2"),
        ("a.jsonl", '{"messages": [5]}', "line 1"),
        ("a.jsonl", "{", "a.jsonl"),
        ("a.txt", "", "a.txt"),
        ("a.jsonl.gz", "no gzip", "a.jsonl.gz"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError, match=message) as caught:
        read_sources(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "gsm8k,", ",", "nothing-like-it", "gsm8k,," * 50, "alpaca/../x"])
def test_names_that_mean_nothing(text: str) -> None:
    with pytest.raises(InputError, match="--prompts"):
        read_sources(text)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises((InputError, OSError)):
        read_sources(str(tmp_path))
