"""Guides: every answer that ends by itself is what was asked for, and the same under every pilot."""

import json
import random
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from blockpilot import LLM, Guide, SamplingParams
from blockpilot.core.errors import InputError, RequestFailedError
from blockpilot.core.tree import DraftTree
from tests.support import byte_vocabulary_fields
from tests.tiny import make_dflash, make_eagle3, make_llm

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
TOKENS: list[str] = byte_vocabulary_fields()["tokenizer.ggml.tokens"]
ENDS = {TOKENS.index(mark): 4.0 for mark in '",}]'}  # a random model would go on for ever
GREEDY = SamplingParams(max_new_tokens=220, logit_bias=ENDS)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm("bytes", drafter=make_dflash("bytes"), context_length=512)


def draw_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Any of what people ask for, small enough that a random model finds an end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = choose.choice(kinds if depth > 2 else [*kinds, "object", "object", "array", "anyOf"])
    if kind == "object":
        names = choose.sample(["a", "bc", "d e", "ö", 'q"t', "long_name"], choose.randint(1, 3))
        schema = {"type": "object", "properties": {name: draw_schema(choose, depth + 1) for name in names}}
        required = choose.sample(names, choose.randint(0, len(names)))
        return schema | {"required": required, "additionalProperties": False}
    if kind == "array":
        return {
            "type": "array",
            "items": draw_schema(choose, depth + 1),
            "minItems": choose.randint(0, 1),
            "maxItems": 2,
        }
    if kind == "anyOf":
        return {"anyOf": [draw_schema(choose, depth + 1) for _ in range(2)]}
    more: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "maxLength": choose.randint(0, 6)},
        "integer": {"type": "integer", "minimum": choose.randint(-5, 5), "maximum": choose.randint(6, 900)},
        "number": {"type": "number", "minimum": -1, "maximum": 20},
        "enum": {"enum": choose.sample(["x", "yy", 3, None, True, 'a"b'], 3)},
        "const": {"const": choose.choice(["k", 17, False])},
        "pattern": {"type": "string", "pattern": choose.choice(["^[a-c]{1,4}$", "^(on|off)$"])},
    }
    return more.get(kind, {"type": kind})


@pytest.mark.parametrize("base", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seed", range(12))
def test_random_schemas_hold_and_every_pilot_writes_the_same(llm: LLM, seed: int, base: SamplingParams) -> None:
    choose = random.Random(seed)
    schemas = [draw_schema(choose) for _ in range(4)]
    params = [replace(base, guide=Guide.json(schema), seed=seed + n) for n, schema in enumerate(schemas)]
    prompts = ["abc", "hello there", "Z", "{"]
    plain = llm.generate(prompts, params, pilot="ar", is_raw=True)
    for schema, answer in zip(schemas, plain, strict=True):
        if answer.finish_reason == "stop":
            jsonschema.validate(json.loads(answer.text), schema)
    assert any(answer.finish_reason == "stop" for answer in plain)
    for pilot in ("fixed:5", "tree:12"):
        found = llm.generate(prompts, params, pilot=pilot, is_raw=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain]


@pytest.mark.parametrize("name", ["bytes", "bytes-int8"])
@pytest.mark.parametrize("drafter", ["dflash2", "eagle3", "ngram", "none"])
def test_guided_answers_beside_free_ones(drafter: str, name: str) -> None:
    makers: dict[str, Any] = {
        "dflash2": lambda: make_dflash(name, is_second=True),
        "eagle3": lambda: make_eagle3(name),
        "ngram": lambda: "ngram",
        "none": lambda: None,
    }
    llm = make_llm(name, drafter=makers[drafter](), context_length=512)
    params = [
        replace(GREEDY, guide=Guide.json(PERSON)),
        GREEDY,
        replace(SAMPLED, guide=Guide.regex("[a-f]{3}-[0-9]{4}")),
    ]
    prompts = ["abc", "hello", "x"]
    expected = [llm.generate(prompt, one, pilot="ar", is_raw=True) for prompt, one in zip(prompts, params, strict=True)]
    assert re.fullmatch("[a-f]{3}-[0-9]{4}", expected[2].text) and expected[2].finish_reason == "stop"
    for pilot in ("ar",) if drafter == "none" else ("fixed:6", "tree:9"):
        found = llm.generate(prompts, params, pilot=pilot, is_raw=True)
        assert [one.token_ids for one in found] == [one.token_ids for one in expected]


def test_forbidden_nodes_are_not_checked_and_forced_tokens_are_free(llm: LLM) -> None:
    choice = replace(GREEDY, guide=Guide.regex("constantinople|constantia"))
    found = llm.generate("abc", choice, pilot="fixed:2", is_raw=True)
    plain = llm.generate("abc", choice, pilot="ar", is_raw=True)
    assert found.token_ids == plain.token_ids and found.text in ("constantinople", "constantia")
    assert found.num_steps < plain.num_steps / 2, "a chain of one token brings many: they are forced"
    state = llm.engine.guides.make(Guide.regex("ab(c|d)"))
    a, b, c, d, x = (TOKENS.index(mark) for mark in "abcdx")
    tree = DraftTree.build(0, [(0, a), (0, x), (1, b), (2, b), (3, d), (3, x), (4, c)])
    pruned = state.prune(tree, max_depth=8)
    assert (pruned.token_ids, pruned.parents) == ((0, a, b, d), (-1, 0, 1, 2))
    assert state.prune(tree, max_depth=8) == pruned, "the guide is where it was"


def test_a_guide_and_its_neighbours_have_log_probabilities(llm: LLM) -> None:
    params = replace(GREEDY, guide=Guide.regex("[ab]{4}"), logprobs=2)
    found = llm.generate("abc", params, pilot="tree:9", is_raw=True)
    assert [one.token_id for one in found.scores] == found.token_ids
    assert all(one.log_prob <= one.best[0][1] for one in found.scores)


def test_any_json_object(llm: LLM) -> None:
    found = llm.generate(["a", "b", "c"], replace(SAMPLED, guide=Guide.json()), pilot="tree:9", is_raw=True)
    ended = [one for one in found if one.finish_reason == "stop"]
    assert all(isinstance(json.loads(one.text), dict) for one in ended)
    assert all(one.text.startswith("{") for one in found)


@pytest.mark.parametrize(
    ("guide", "complaint"),
    [
        (Guide.regex("(unclosed"), "the guide's regex cannot be used"),
        (Guide.json({"type": "strong"}), "the guide's json cannot be used"),
        (Guide("json", "{"), "the guide's json cannot be used"),
        (Guide.grammar("start: undefined"), "the guide's grammar cannot be used"),
        (Guide.json({"type": "object", "patternProperties": {"(": {}}}), "the guide's json cannot be used"),
    ],
)
def test_guides_that_say_nothing_are_refused(llm: LLM, guide: Guide, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        llm.generate("abc", replace(GREEDY, guide=guide), is_raw=True)
    assert not llm.engine.has_work


def test_guides_are_checked_when_they_are_made() -> None:
    for make in (lambda: Guide("yaml", "x"), lambda: Guide.regex(" "), lambda: Guide.regex("x" * (1 << 18 | 1))):
        with pytest.raises(InputError, match="guide"):
            make()
    with pytest.raises(InputError, match="no JSON"):
        Guide.json({"a": object()})
    with pytest.raises(InputError, match=r"Guide\.json"):
        SamplingParams(guide={"type": "object"})  # type: ignore[arg-type]
    with pytest.raises(InputError, match="without ignore_eos"):
        SamplingParams(guide=Guide.json(), ignore_eos=True)


def test_a_guide_that_fails_ends_its_own_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = llm.generate("hello", GREEDY, pilot="ar", is_raw=True)
    made = llm.engine.guides.make

    def make_bad(guide: Guide) -> Any:
        state, calls = made(guide), iter(range(100))
        allowed = state.allowed
        state.allowed = lambda path: allowed(path) if next(calls) < 5 else 1 / 0  # type: ignore[method-assign,assignment,return-value]
        return state

    monkeypatch.setattr(llm.engine.guides, "make", make_bad)
    params = [replace(GREEDY, guide=Guide.json(PERSON)), GREEDY]
    with pytest.raises(RequestFailedError, match="the guide failed") as caught:
        llm.generate(["abc", "hello"], params, pilot="tree:9", is_raw=True)
    assert caught.value.completions[1].token_ids == expected.token_ids
    assert not llm.engine.has_work and llm.engine.runner.cache.num_free == 4
