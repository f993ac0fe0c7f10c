"""Streams: the pieces are the text, stop strings never show, closing frees the slot, streams do not mix."""

import pytest

from blockpilot.core.errors import BlockPilotError
from blockpilot.core.sampling_params import SamplingParams
from tests.tiny import make_dflash, make_llm

PROMPT = "the quick brown fox"
PARAMS = SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.mark.parametrize("pilot", ["ar", "fixed:5", "tree:9"])
def test_the_stream_adds_up_to_the_completion(pilot: str) -> None:
    llm = make_llm(drafter=make_dflash())
    updates = list(llm.stream(PROMPT, PARAMS, pilot=pilot, is_raw=True))
    assert [update.completion is None for update in updates] == [True] * (len(updates) - 1) + [False]
    completion = updates[-1].completion
    assert completion is not None
    assert "".join(update.new_text for update in updates) == completion.text
    assert completion.text == llm.generate(PROMPT, PARAMS, pilot="ar", is_raw=True).text


@pytest.mark.parametrize("pilot", ["ar", "fixed:5", "tree:9"])
@pytest.mark.parametrize("start", [1, 7, 16])
def test_nothing_of_a_stop_string_is_ever_streamed(pilot: str, start: int) -> None:
    llm = make_llm(drafter=make_dflash())
    text = llm.generate(PROMPT, PARAMS, pilot="ar", is_raw=True).text
    stop = text[start : start + 4]
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(stop,))
    shown = ""
    for update in llm.stream(PROMPT, params, pilot=pilot, is_raw=True):
        shown += update.new_text
        assert text[: text.index(stop)].startswith(shown)
    assert update.completion is not None
    assert shown == update.completion.text == text[: text.index(stop)]
    assert update.completion.finish_reason == "stop"


def test_a_tail_that_looked_like_a_stop_is_shown_at_the_end() -> None:
    llm = make_llm()
    text = llm.generate(PROMPT, PARAMS, is_raw=True).text
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, stop=(text[-3:] + "~",))
    updates = list(llm.stream(PROMPT, params, is_raw=True))
    assert "".join(update.new_text for update in updates) == text
    assert updates[-1].new_text.endswith(text[-3:])
    assert updates[-1].completion is not None and updates[-1].completion.finish_reason == "length"


def test_closing_a_stream_frees_its_slot() -> None:
    llm = make_llm(drafter=make_dflash())
    stream = llm.stream(PROMPT, PARAMS, pilot="fixed:4", is_raw=True)
    next(stream)
    assert llm.engine.runner.cache.num_free == 3
    stream.close()  # type: ignore[attr-defined]
    assert llm.engine.runner.cache.num_free == 4
    assert not llm.engine.has_work
    assert llm.desk._boxes == {}


def test_streams_side_by_side_lose_nothing_to_each_other() -> None:
    llm = make_llm(drafter=make_dflash())
    prompts = [PROMPT, "another one", "Z"]
    expected = [llm.generate(prompt, PARAMS, pilot="ar", is_raw=True).text for prompt in prompts]
    streams = [llm.stream(prompt, PARAMS, pilot="fixed:3", is_raw=True) for prompt in prompts]
    shown = [""] * 3
    is_open = [True] * 3
    while any(is_open):
        for index, stream in enumerate(streams):
            update = next(stream, None)
            is_open[index] = update is not None
            shown[index] += update.new_text if update else ""
    assert shown == expected


def test_a_batch_during_an_open_stream_leaves_the_stream_whole() -> None:
    llm = make_llm()
    short = SamplingParams(max_new_tokens=6, ignore_eos=True)
    expected = llm.generate(PROMPT, short, is_raw=True).text
    stream = llm.stream(PROMPT, short, is_raw=True)
    shown = next(stream).new_text
    assert [c.num_tokens for c in llm.generate(["ab", "cd"], PARAMS, is_raw=True)] == [30, 30]
    assert shown + "".join(update.new_text for update in stream) == expected


def test_a_stream_whose_pass_failed_elsewhere_ends_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    stream = llm.stream(PROMPT, PARAMS, is_raw=True)
    next(stream), next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "verify", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llm.generate("abc", PARAMS, is_raw=True)
    with pytest.raises(BlockPilotError, match="dropped"):
        next(stream)
    assert llm.generate("abc", PARAMS, is_raw=True).num_tokens == 30
