"""Random JSON schemas: `python -m tests.fuzz.schemas --count 10000 --seed 0`.

A tiny random model answers under each of them, sampled, as draft trees and as chains. Every answer that ends by itself
must parse and validate, and a share of them must be what plain decoding writes. Exit code 1 where one does not.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from typing import Any

import jsonschema

from blockpilot import LLM, Guide, SamplingParams
from tests.support import byte_vocabulary_fields
from tests.tiny import make_dflash, make_llm

_BATCH = 16
_PILOTS = ("fixed:5", "tree:12", "tree:30")
_PLAIN_SHARE = 4  # one batch of so many is compared with plain decoding
_SECONDS_BETWEEN_LINES = 10.0
_NAMES = ("a", "bc", "d e", "ö", 'q"t', "long_name", "漢", "\\", "")
_TOKENS: list[str] = byte_vocabulary_fields()["tokenizer.ggml.tokens"]
ENDS = {_TOKENS.index(mark): 4.0 for mark in '",}]'}  # a random model would go on for ever


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    outcomes = check(make_guided_llm(), count=arguments.count, seed=arguments.seed, show=print)
    print(f"{arguments.count:,} schemas, seed {arguments.seed}: {dict(outcomes)}")
    return 1 if outcomes["wrong"] or outcomes["unlike plain decoding"] or not outcomes["valid"] else 0


def make_guided_llm() -> LLM:
    return make_llm("bytes-int8", drafter=make_dflash("bytes-int8"), context_length=512, num_slots=_BATCH)


def check(llm: LLM, *, count: int, seed: int, show: Any) -> Counter[str]:
    """How the answers ended."""
    outcomes: Counter[str] = Counter(valid=0, wrong=0)
    shown = time.monotonic()
    for first in range(0, count, _BATCH):
        schemas = [draw_schema(random.Random(f"{seed} {first + place}")) for place in range(min(_BATCH, count - first))]
        params = [
            SamplingParams(
                max_new_tokens=200,
                logit_bias=tuple(ENDS.items()),
                temperature=(0.0, 1.0, 1.6)[place % 3],
                seed=first + place,
                guide=Guide.json(schema),
            )
            for place, schema in enumerate(schemas)
        ]
        prompts = [[1 + (first + place) % 200] for place in range(len(schemas))]
        turn = first // _BATCH
        answers = llm.generate(prompts, params, pilot=_PILOTS[turn % len(_PILOTS)])
        for number, (schema, answer) in enumerate(zip(schemas, answers, strict=True), start=first):
            outcome = judge(schema, answer.text, answer.finish_reason)
            outcomes[outcome] += 1
            if outcome == "wrong":
                show(f"schema {number}: {json.dumps(schema)}\n    {answer.text!r}")
        if turn % _PLAIN_SHARE == 0:
            plain = llm.generate(prompts, params, pilot="ar")
            differing = sum(one.token_ids != two.token_ids for one, two in zip(answers, plain, strict=True))
            outcomes["unlike plain decoding"] += differing
        if time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
            shown = time.monotonic()
            show(f"{first + len(schemas):,} of {count:,} schemas: {dict(outcomes)}")
    return outcomes


def judge(schema: dict[str, Any], text: str, finish_reason: str) -> str:
    if finish_reason != "stop":
        return finish_reason
    try:
        jsonschema.validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return "wrong"
    return "valid"


def draw_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Any of what people ask for, small enough that a random model finds an end."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format", "choice"]
    if depth < 3:
        kinds += ["object", "object", "object", "array", "tuple", "anyOf", "reference"]
    kind = choose.choice(kinds)
    if kind == "object":
        names = choose.sample(_NAMES, choose.randint(0, 4))
        properties = {name: draw_schema(choose, depth + 1) for name in names}
        required = choose.sample(names, choose.randint(0, len(names)))
        schema: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
        if choose.random() < 0.8:
            return schema | {"additionalProperties": False}
        return schema | {"additionalProperties": {"type": choose.choice(["integer", "boolean"])}}
    if kind == "array":
        least = choose.randint(0, 2)
        return {
            "type": "array",
            "items": draw_schema(choose, depth + 1),
            "minItems": least,
            "maxItems": least + choose.randint(0, 2),
        }
    if kind == "tuple":
        items = [draw_schema(choose, depth + 1) for _ in range(choose.randint(1, 3))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if kind == "anyOf":
        return {"anyOf": [draw_schema(choose, depth + 1) for _ in range(choose.randint(1, 3))]}
    if kind == "reference" and depth == 0:
        return {
            "$defs": {"node": draw_schema(choose, depth + 1)},
            "type": "object",
            "properties": {"one": {"$ref": "#/$defs/node"}, "two": {"$ref": "#/$defs/node"}},
            "required": choose.sample(["one", "two"], choose.randint(0, 2)),
            "additionalProperties": False,
        }
    low = choose.randint(-5000, 5000)
    more: dict[str, dict[str, Any]] = {
        "string": {"type": "string", "minLength": choose.randint(0, 2), "maxLength": choose.randint(2, 9)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + choose.randint(0, 900)},
        "number": {"type": "number", "exclusiveMinimum": low / 8, "maximum": low / 8 + 20},
        "enum": {"enum": choose.sample(["x", "yy", 3, None, True, 'a"b', 1.5, "ö", ""], 3)},
        "const": {"const": choose.choice(["k", 17, False, None, "with space"])},
        "pattern": {"type": "string", "pattern": choose.choice(["^[a-c]{1,4}$", "^(on|off)$", r"^\d{2}-[A-F]$"])},
        "format": {"type": "string", "format": choose.choice(["date", "time", "uuid", "ipv4"])},
        "choice": {"type": ["integer", "null", "boolean"]},
    }
    return more.get(kind, {"type": kind if kind in ("boolean", "null") else "boolean"})


if __name__ == "__main__":
    sys.exit(main())
