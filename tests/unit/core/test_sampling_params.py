import math
from struct import pack, unpack

import pytest

from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import MAX_SEED, SamplingParams


def test_default_is_greedy():
    assert SamplingParams().is_greedy
    assert not SamplingParams(temperature=0.1).is_greedy


def test_edges_that_are_allowed():
    SamplingParams(max_new_tokens=1, temperature=0, top_p=1.0, top_k=0, seed=0)
    SamplingParams(top_p=1e-9, seed=MAX_SEED, stop=("a",))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_new_tokens", 0),
        ("max_new_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),  # beyond what a GPU can be told
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("seed", -1),
        ("seed", MAX_SEED + 1),
    ],
)
def test_bad_values_are_named(field, value):
    with pytest.raises(InputError, match=field):
        SamplingParams(**{field: value})


def test_empty_stop_string_is_refused():
    with pytest.raises(InputError, match="stop string is empty"):
        SamplingParams(stop=("a", ""))


def test_only_limits_on_sampling_filter():
    assert SamplingParams(temperature=1, top_k=5).is_filtered
    assert SamplingParams(temperature=1, top_p=0.9).is_filtered
    assert not SamplingParams(temperature=1).is_filtered
    assert not SamplingParams(top_k=5, top_p=0.5).is_filtered  # greedy takes the best token whatever else may be taken


def test_words_hold_temperature_and_seed():
    seed = 2**63 - 5
    words = SamplingParams(temperature=0.5, seed=seed).words
    assert unpack("<fQ", pack("<3i", *words)) == (0.5, seed)
    assert SamplingParams().words == (0, 0, 0)


@pytest.mark.parametrize("temperature", [1e-39, 1e-12, 9.9e-6])
def test_a_temperature_that_logits_cannot_be_divided_by_is_greedy(temperature):
    params = SamplingParams(temperature=temperature, top_k=5, seed=3)
    assert params.temperature == 0 and params.is_greedy and not params.is_filtered
    assert params.words == SamplingParams(seed=3).words


def test_the_lowest_temperature_that_samples():
    params = SamplingParams(temperature=1e-5)
    assert params.temperature == 1e-5 and not params.is_greedy
    assert unpack("<fQ", pack("<3i", *params.words))[0] > 0
