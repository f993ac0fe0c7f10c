"""Bulk generation must say what the engine says."""

import pytest

from blockpilot import SamplingParams
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.training.bulk_generation import BulkGenerator, Row
from tests.tiny import make_decoder, make_llm

PROMPTS = ["the quick brown fox jumps over", "abc", "Z", "speculation 0123", "one more", "x" * 33, "last"]
MAX_LENGTH = 60


def generate(rows: list[Row], *, num_rows: int = 3, eos: tuple[int, ...] = (), seed: int = 0, capacity: int = 64):
    generator = BulkGenerator(
        make_decoder().eval(), num_rows=num_rows, capacity=capacity, eos_token_ids=eos, seed=seed, refill_every=5
    )
    finished = list(generator.run(iter(rows)))
    assert sorted(map(id, finished)) == sorted(map(id, rows)), "every text comes back once"
    return [row.answer_ids for row in rows]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """The engine's greedy answers, up to MAX_LENGTH tokens of prompt and answer."""
    llm = make_llm()
    params = [SamplingParams(max_new_tokens=MAX_LENGTH - len(prompt), ignore_eos=True) for prompt in PROMPTS]
    return [llm.generate(p, q, is_raw=True).token_ids for p, q in zip(PROMPTS, params, strict=True)]


def greedy_rows(max_length: int = MAX_LENGTH) -> list[Row]:
    tokenizer = make_llm().tokenizer
    return [Row(tokenizer.encode(prompt), 0.0, max_length) for prompt in PROMPTS]


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_greedy_answers_are_the_engines(expected: list[list[int]], num_rows: int) -> None:
    assert generate(greedy_rows(), num_rows=num_rows) == expected


def test_an_answer_ends_with_its_eos(expected: list[list[int]]) -> None:
    eos = expected[0][7]
    cut = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in expected]
    assert any(len(short) < len(long) for short, long in zip(cut, expected, strict=True))
    assert generate(greedy_rows(), eos=(eos,)) == cut


def test_the_first_token_may_end_an_answer(expected: list[list[int]]) -> None:
    eos = tuple({ids[0] for ids in expected})
    assert generate(greedy_rows(), num_rows=2, eos=eos) == [ids[:1] for ids in expected]
    assert [len(answer) for answer in generate([*greedy_rows(34)[:1], Row([1, 2, 3], 0.0, 4)])] == [4, 1]


def test_max_length_counts_prompt_and_answer() -> None:
    answers = generate(greedy_rows(34), capacity=34)
    assert [len(answer) for answer in answers] == [34 - len(prompt) for prompt in PROMPTS]


def test_a_prompt_without_room_is_refused() -> None:
    with pytest.raises(InputError, match="10 tokens leaves no room for an answer within 10"):
        generate([Row([1] * 10, 0.0, 10)])


def test_samples_depend_on_the_seed() -> None:
    def sample(seed: int) -> list[list[int]]:
        return generate([Row([5, 6, 7], 1.0, 40) for _ in range(4)], seed=seed)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert len({tuple(answer) for answer in sample(1)}) == 4, "rows do not share their noise"


def test_a_target_without_finite_scores_writes_nothing() -> None:
    decoder = make_decoder().eval().requires_grad_(False)
    generator = BulkGenerator(decoder, num_rows=3, capacity=64, eos_token_ids=(), seed=0, refill_every=5)
    texts = generator.run(iter(greedy_rows()))
    next(texts)
    decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(BlockPilotError, match="the target gives no finite scores"):
        list(texts)
