"""What a caller may ask of one request. Everything is checked here: a pass never meets a value that it cannot use."""

import math
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from operator import index
from struct import pack, unpack
from typing import Any

from blockpilot.core.errors import InputError, show_value
from blockpilot.core.guide import Guide

MAX_COUNT = 2**31 - 1  # what a GPU can be told
MAX_SEED = 2**63 - 1
MAX_TEMPERATURE = 1e6  # all tokens are equally likely long before
MIN_TEMPERATURE = 1e-5  # below it sampling is greedy: logits divided by it would leave the range of float32
MAX_LOGPROBS = 20
MAX_BIAS, MAX_BIASES = 100.0, 1024
_RANGES = {"min_p": (0, 1), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2), "repetition_penalty": (0.01, 10)}
MAX_STOPS = 64  # strings or tokens that may end an answer
MAX_STOP_LENGTH = 1024  # characters; every new piece of text is compared with all of them


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Limits and randomness of one answer. The same seed gives the same text under every pilot and block size."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0  # tokens less likely than this share of the likeliest one are not sampled
    seed: int = 0
    stop: tuple[str, ...] = ()  # or one string
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0  # off the score of every token that the answer has
    frequency_penalty: float = 0.0  # the same for each time that it has it
    repetition_penalty: float = 1.0  # scores of tokens of prompt and answer are divided by it, negative ones multiplied
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id and what its score gains; a dict will do
    guide: Guide | None = None  # what the answer must look like
    logprobs: int | None = None  # log-probabilities of all tokens, and of so many of the likeliest in their places
    keeps_trees: bool = False  # what every step asked the target to check, in its record; for people who look at it

    def __post_init__(self) -> None:
        found: dict[str, Any] = {
            "max_new_tokens": whole_number(self.max_new_tokens, "max_new_tokens", least=1),
            "temperature": _read_temperature(self.temperature),
            "top_p": _number(self.top_p, "top_p"),
            "top_k": whole_number(self.top_k, "top_k"),
            "seed": whole_number(self.seed, "seed", most=MAX_SEED),
            "stop": _read_stops(self.stop),
            "stop_token_ids": read_token_ids(self.stop_token_ids, "stop_token_ids", most=MAX_STOPS),
        }
        for name, (least, most) in _RANGES.items():
            found[name] = _number(getattr(self, name), name)
            if not least <= found[name] <= most:
                raise InputError(f"{name} must lie between {least} and {most}, got {show_value(getattr(self, name))}")
        found["logit_bias"] = _read_biases(self.logit_bias)
        if self.logprobs is not None:
            found["logprobs"] = whole_number(self.logprobs, "logprobs", most=MAX_LOGPROBS)
        if self.guide is not None and (not isinstance(self.guide, Guide) or self.ignore_eos):
            raise InputError("guide must be a Guide, such as Guide.json(schema), and goes without ignore_eos")
        if not 0 < found["top_p"] <= 1:
            raise InputError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        for name in ("ignore_eos", "keeps_trees"):
            if not isinstance(getattr(self, name), bool):
                raise InputError(f"{name} must be True or False, got {show_value(getattr(self, name))}")
        for name, value in found.items():
            object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens may not be sampled."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def is_penalised(self) -> bool:
        """Whether what was written changes scores."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def is_adjusted(self) -> bool:
        """Whether tokens are chosen by scores that the host makes of logits."""
        return self.is_penalised or bool(self.logit_bias) or self.guide is not None

    @cached_property
    def needs_logits(self) -> bool:
        """Whether a pass cannot choose tokens by itself."""
        return self.is_filtered or self.is_adjusted or self.logprobs is not None

    @cached_property
    def needs_host(self) -> bool:
        """Whether a step cannot stay on a device."""
        return self.needs_logits or self.keeps_trees

    @cached_property
    def words(self) -> tuple[int, int, int]:
        """Temperature and seed as int32 numbers, as a GPU reads them."""
        return unpack("<3i", pack("<fQ", self.temperature, self.seed))


def whole_number(value: Any, name: str, *, least: int = 0, most: int = MAX_COUNT) -> int:
    """Python's integers and NumPy's; nothing is rounded."""
    try:
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None:
        raise InputError(f"{name} must be a whole number, got {show_value(value)}")
    if not least <= number <= most:
        bound = f"at least {least}" if number < least else f"at most {most}"
        raise InputError(f"{name} must be {bound}, got {show_value(number)}")
    return number


def read_token_ids(values: Any, name: str, *, most: int = MAX_COUNT, least: int = 0) -> tuple[int, ...]:
    """A sequence of token ids as integers; the vocabulary is checked by those who know it."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Collection):
        raise InputError(f"{name} must be a list of token ids, got {show_value(values)}")
    if len(values) > most:
        raise InputError(f"{name} holds {len(values)} token ids; {most} are allowed")
    found = tuple(values)
    if all(type(value) is int and least <= value <= MAX_COUNT for value in found):
        return found
    return tuple(whole_number(value, f"{name}[{place}]", least=least) for place, value in enumerate(found))


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number, got {show_value(value)}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{name} must be a finite number, got {show_value(value)}")
    return number


def _read_temperature(value: Any) -> float:
    """The smallest ones are greedy: no other token would ever be sampled."""
    number = _number(value, "temperature")
    if not 0 <= number <= MAX_TEMPERATURE:
        raise InputError(
            f"temperature must be 0 (greedy) or a positive number up to {MAX_TEMPERATURE:g}, got {show_value(value)}"
        )
    return 0.0 if number < MIN_TEMPERATURE else number


def _read_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """Sorted by token; the vocabulary is checked by those who know it."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise InputError(f"logit_bias must map token ids to numbers, got {show_value(value)}")
    if len(pairs) > MAX_BIASES:
        raise InputError(f"logit_bias holds {len(pairs)} tokens; {MAX_BIASES} are allowed")
    found = {whole_number(token_id, "a token of logit_bias"): _number(bias, "a bias") for token_id, bias in pairs}
    if any(abs(bias) > MAX_BIAS for bias in found.values()):
        raise InputError(f"biases lie between {-MAX_BIAS:g} and {MAX_BIAS:g}")
    return tuple(sorted(found.items()))


def _read_stops(value: Any) -> tuple[str, ...]:
    stops = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
    if stops is None or not all(isinstance(text, str) for text in stops):
        raise InputError(f"stop must be a string or a list of strings, got {show_value(value)}")
    if not all(stops):
        raise InputError("a stop string is empty: leave it out instead")
    if len(stops) > MAX_STOPS or any(len(text) > MAX_STOP_LENGTH for text in stops):
        raise InputError(
            f"stop may hold {MAX_STOPS} strings of {MAX_STOP_LENGTH} characters each: give fewer or shorter"
        )
    return stops
