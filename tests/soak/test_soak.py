"""A few hundred asks of all manners; `make soak` sends 20,000."""

from collections import Counter
from pathlib import Path

import pytest

from blockpilot import SamplingParams
from tests.soak.asks import MANNERS, Ask, draw_ask
from tests.soak.clients import Choice, Reply
from tests.soak.judge import Judge
from tests.soak.run import run
from tests.soak.server import make_soak_llm


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="what a process holds is read from /proc")
def test_a_server_under_all_manners_of_clients() -> None:
    asks = [draw_ask(7, number) for number in range(200)]
    soak = run(asks, 16, lambda line: None, slowest_health=2000)  # other tests run beside this one
    assert not soak.faults, soak.describe() + "\n" + "\n".join(soak.faults)
    assert soak.num_judged > 100 and soak.num_turns > 3
    assert {"200", "left", "400", "404", "413"} <= set(soak.ends)
    assert len(soak.health.answers) > 20 and sum(soak.last_ends.values()) > 20


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="what a process holds is read from /proc")
def test_second_turns_of_a_client_that_is_alone_are_known() -> None:
    """Beside others it depends on them whether a slot with the first turn is left."""
    turns = [ask for ask in (draw_ask(7, number) for number in range(200)) if ask.manner == "turns"]
    soak = run(turns, 1, lambda line: None, slowest_health=2000)
    growing = "megabytes grow"  # the first look is after one ask, before the server has made its buffers
    assert not [fault for fault in soak.faults if not fault.startswith(growing)], soak.describe()
    assert soak.num_turns > 3 and soak.num_known > 500


def test_asks_are_those_of_their_number_and_of_all_kinds() -> None:
    asks = [draw_ask(0, number) for number in range(600)]
    assert asks[:50] == [draw_ask(0, number) for number in range(50)] != [draw_ask(1, number) for number in range(50)]
    assert set(Counter(ask.manner for ask in asks)) == set(MANNERS)
    fields = Counter(name for ask in asks if ask.manner not in ("bad", "half") for name in ask.call)
    assert {"top_p", "min_p", "logit_bias", "response_format", "stop", "n", "logprobs", "blockpilot"} <= set(fields)


def test_the_judge_finds_what_is_wrong() -> None:
    judge = Judge(make_soak_llm())
    body = b'{"model": "tiny", "seed": 1, "prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": true}'
    ask = Ask(0, "/v1/completions", body, "whole")
    text = judge.llm.generate("hello", SamplingParams(max_new_tokens=5, ignore_eos=True), is_raw=True).text
    usage = {"completion_tokens": 5, "prompt_tokens": len(judge.llm.tokenizer.encode("hello"))}
    assert judge.find_fault(ask, Reply("200", [Choice(text, "length")], usage)) is None
    for wrong in (
        Reply("200", [Choice(text + "x", "length")], usage),
        Reply("200", [Choice(text, "stop")], usage),
        Reply("200", [], usage),
        Reply("200", [Choice(text, "length")], usage | {"completion_tokens": 4}),
        Reply("200", [Choice(text, "length")], None),
    ):
        assert judge.find_fault(ask, wrong) is not None
