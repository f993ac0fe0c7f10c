"""A short run of `tests.fuzz.schemas`."""

from tests.fuzz.profiles import IS_LONG
from tests.fuzz.schemas import check, judge, make_guided_llm


def test_answers_are_what_their_schemas_allow() -> None:
    shown: list[str] = []
    found = check(make_guided_llm(), count=10_000 if IS_LONG else 96, seed=0, show=shown.append)
    assert found["valid"] >= 50 and not found["wrong"] and not found["unlike plain decoding"], shown
    assert not found["error"], shown


def test_a_wrong_answer_would_be_seen() -> None:
    schema = {"type": "object", "required": ["a"]}
    assert judge(schema, '{"a": 1}', "stop") == "valid"
    assert judge(schema, '{"b": 1}', "stop") == judge(schema, "{", "stop") == "wrong"
    assert judge(schema, "{", "length") == "length"
