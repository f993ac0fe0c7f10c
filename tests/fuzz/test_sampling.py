"""Any object for any field of a request: it is refused, or answered, and its neighbours never notice."""

import dataclasses
import decimal
import fractions
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from tests.fuzz.profiles import fuzz, refuses
from tests.tiny import make_llm

FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
PROMPTS = ("abc abc", "the quick brown fox")
_NUMBERS = st.one_of(
    st.integers(),
    st.integers(-2, 70),
    st.floats(),
    st.floats(-3, 3),
    st.booleans(),
    st.fractions(),
    st.sampled_from((decimal.Decimal("NaN"), np.float32(0.5), np.int64(3), np.float16("inf"), 10**400, 1j, 5e-324)),
    st.sampled_from((fractions.Fraction(1, 3), np.array(1), np.array([1, 2]), np.bool_(True), 1e308, 2**63, 0.0, -0.0)),
)
_PLAIN = st.one_of(
    _NUMBERS, st.none(), st.text(max_size=3), st.binary(max_size=3), st.sampled_from(("\ud800", "a" * 2000))
)
_LISTS = st.lists(_PLAIN, max_size=3)
_PAIRS = st.dictionaries(st.one_of(st.integers(-1, 70), st.text(max_size=1)), _PLAIN, max_size=3)
VALUES = st.one_of(
    _PLAIN, _LISTS, _LISTS.map(tuple), _PAIRS, st.sets(st.integers(0, 70)), st.just(object()), st.just(len)
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm(drafter="ngram")


def params(**values: Any) -> SamplingParams:
    return SamplingParams(**({"max_new_tokens": 6} | values))


@fuzz(st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=2), share=4)
def test_any_object_is_refused_or_serves_beside_neighbours(llm: LLM, values: dict[str, Any]) -> None:
    found: list[SamplingParams] = []
    if refuses(lambda: found.append(params(**values))):
        return
    asked = dataclasses.replace(found[0], max_new_tokens=min(found[0].max_new_tokens, 12))
    alone = llm.generate(PROMPTS[0], params(), is_raw=True)
    answers: list[Any] = []
    if not refuses(lambda: answers.extend(llm.generate(list(PROMPTS), [params(), asked], is_raw=True))):
        assert answers[0].token_ids == alone.token_ids
        assert 1 <= answers[1].num_tokens <= asked.max_new_tokens
