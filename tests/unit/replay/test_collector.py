"""Answers that share their passes give the traces that they give alone."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blockpilot import LLM
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay import anchor_drafts
from blockpilot.replay import collector as collector_module
from blockpilot.replay.anchor_drafts import AnchorBlocks
from blockpilot.replay.collector import Answered, Collector, cut_groups
from blockpilot.replay.config import ReplayRequest
from blockpilot.replay.finished_text import FinishedText
from blockpilot.replay.simulate import simulate
from blockpilot.replay.traces import ABSENT, Trace
from tests.tiny import EOS_ID, VOCAB_SIZE, make_dflash, make_llm
from tests.unit.replay.pieces import SIZES, decode, make_config, make_pair, make_requests, run_collect, shapes

DEVICE = torch.device("cpu")


class CutCollector(Collector):
    """The engine's answers, some of them ended early: their lengths differ much, and one has no anchor."""

    def __init__(self, llm: LLM, **settings: object) -> None:
        super().__init__(llm, make_requests(llm), make_config(shard_size=5, **settings))
        self.written = super().answer(self.requests)

    def answer(self, requests: Sequence[ReplayRequest]) -> list[FinishedText]:
        pairs = zip(self.written, (28, 1, 9, 17, 2), strict=True)
        return [replace(text, answer_ids=text.answer_ids[:limit]) for text, limit in pairs]


def be_exact(llm: LLM) -> None:
    """In float64, what the order of additions changes is far below what a mistake would."""
    assert isinstance(llm.drafter, DFlashDrafter)
    for module in (llm.engine.runner.decoder, llm.drafter.model, llm.drafter.context_projection, llm.drafter.head):
        assert isinstance(module, torch.nn.Module)
        module.double()


def trace_all(collector: Collector) -> list[Trace]:
    return list(collector.trace(0))


def columns(trace: Trace) -> Iterator[tuple[str, object]]:
    """Every value of a trace by name."""
    for name, value in vars(trace).items():
        if name not in ("prefill", "drafts"):
            yield name, value
    yield from vars(trace.prefill).items()
    for size, draft in trace.drafts.items():
        for name, column in vars(draft).items():
            yield f"{name} of {size}", column


def assert_alike(alone: Sequence[Trace], together: Sequence[Trace]) -> None:
    for first, second in zip(alone, together, strict=True):
        for (name, value), (other_name, other) in zip(columns(first), columns(second), strict=True):
            assert name == other_name
            if isinstance(value, float | np.ndarray) and np.asarray(value).dtype.kind == "f":
                np.testing.assert_allclose(np.asarray(other), value, rtol=1e-5, atol=1e-5, err_msg=name)
            elif isinstance(value, np.ndarray):
                np.testing.assert_array_equal(np.asarray(other), value, err_msg=name)
                assert np.asarray(other).dtype == value.dtype
            else:
                assert value == other, name


def share_passes(monkeypatch: pytest.MonkeyPatch, num_texts: int = 3) -> None:
    monkeypatch.setitem(collector_module.TEXTS_PER_PASS, "cpu", num_texts)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_group_gives_the_traces_of_its_answers_alone(
    is_second: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make_pair(is_second=is_second)
    collector = CutCollector(llm, temperature=temperature)
    be_exact(llm)
    alone = trace_all(collector)
    share_passes(monkeypatch)
    together = trace_all(collector)
    assert_alike(alone, together)
    assert min(trace.num_anchors for trace in together) == 0
    assert any((trace.draft(8).true_ranks != ABSENT).any() for trace in together[3:])  # also in the second group


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("is_second", [False, True])
def test_lengths_of_a_group_are_those_of_online_decoding(
    is_second: bool, temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_passes(monkeypatch)
    llm = make_pair(is_second=is_second)
    traces = run_collect(llm, tmp_path, temperature=temperature, shard_size=5)
    for size in (3, 8):
        online = decode(llm, FixedPilot(size), temperature=temperature)
        for trace, completion in zip(traces, online, strict=True):
            assert trace.answer_ids.tolist() == completion.token_ids and trace.num_disagreements == 0
            assert shapes(simulate(trace, FixedPilot(size))) == shapes(completion.steps)


def test_disagreements_are_counted_per_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    share_passes(monkeypatch)
    collector = CutCollector(make_pair())
    ids = collector.written[3].answer_ids
    ids[16] = (ids[16] + 1) % VOCAB_SIZE
    assert [trace.num_disagreements for trace in trace_all(collector)] == [0, 0, 0, 1, 0]


def test_groups_may_be_cut_into_texts_and_pieces_of_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_pair()
    collector = CutCollector(llm, temperature=0.8)
    be_exact(llm)
    alone = trace_all(collector)
    share_passes(monkeypatch, num_texts=5)
    monkeypatch.setattr(anchor_drafts, "LOGITS_PER_PASS", {"cpu": 61 * 24})
    for num_scores in (4 * 8 * 40 * 40, 4 * 8 * 40 * 5):  # a text or two in one pass, then a few blocks
        monkeypatch.setattr(anchor_drafts, "SCORES_PER_PASS", {"cpu": num_scores})
        assert_alike(alone, trace_all(collector))


def test_a_reduced_head_works_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_dflash(is_second=True)
    model.draft_token_ids = torch.arange(0, 60, 2)
    llm = make_llm(drafter=model)
    collector = CutCollector(llm, temperature=0.8)
    be_exact(llm)
    alone = trace_all(collector)
    share_passes(monkeypatch)
    assert_alike(alone, trace_all(collector))


def test_visited_anchors_work_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = CutCollector(make_pair(), anchors="visited", draft_sizes=(), temperature=0.8)
    alone = trace_all(collector)
    share_passes(monkeypatch)
    for first, second in zip(alone, trace_all(collector), strict=True):
        np.testing.assert_array_equal(first.emitted, second.emitted)


def test_a_group_passes_through_the_models_once(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_pair()
    collector = CutCollector(llm)
    calls: list[str] = []
    llm.engine.runner.decoder.register_forward_hook(lambda *_: calls.append("target"))
    llm.drafter.model.register_forward_hook(lambda *_: calls.append("drafter"))  # type: ignore[union-attr]
    for num_texts, num_groups in ((1, 5), (3, 2), (8, 1)):
        share_passes(monkeypatch, num_texts)
        calls.clear()
        trace_all(collector)
        assert (calls.count("target"), calls.count("drafter")) == (num_groups, num_groups * len(SIZES))


def test_long_texts_share_a_pass_with_fewer_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def answered(length: int) -> Answered:
        request = ReplayRequest("", "", [1] * (length - 1), 0)
        return request, FinishedText(request.prompt_ids, [EOS_ID], make_config().params(0))

    def cut(lengths: list[int], max_texts: int) -> list[list[int]]:
        groups = cut_groups([answered(length) for length in lengths], max_texts)
        return [[len(request.prompt_ids) + 1 for request, _ in group] for group in groups]

    monkeypatch.setattr(collector_module, "TOKENS_PER_PASS", 60)
    assert cut([5, 5, 5, 5, 5], 2) == [[5, 5], [5, 5], [5]]
    assert cut([10, 10, 30, 10, 99, 60, 2], 8) == [[10, 10], [30, 10], [99], [60], [2]]
    assert cut([20, 20, 20, 20], 8) == [[20, 20, 20], [20]] and cut([], 8) == []


def test_passes_name_every_block_once_and_in_order() -> None:
    texts = [
        FinishedText([1] * first, [2] * length, make_config().params(0)) for first, length in ((3, 6), (7, 1), (2, 4))
    ]
    blocks = AnchorBlocks(texts, DEVICE)
    expected = [(row, place) for row, place in zip(blocks.texts.tolist(), blocks.places.tolist(), strict=True)]
    assert expected == [(0, 3), (0, 4), (0, 5), (0, 6), (0, 7), (1, 7), (2, 2), (2, 3), (2, 4)]
    for num_blocks in (1, 2, 5, 10, 99):
        found = []
        for part in blocks.passes(num_blocks):
            rows = torch.arange(len(texts))[part.texts, None].expand_as(part.anchors)
            found += list(
                zip(rows.flatten()[part.rows].tolist(), part.anchors.flatten()[part.rows].tolist(), strict=True)
            )
            assert int(part.anchors.max()) == part.reach and part.anchors.numel() <= num_blocks
        assert found == expected


def test_bulk_answers_are_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU greedy answers are written in bulk; in float32 the two agree."""
    llm, config = make_pair(), make_config()
    requests = make_requests(llm)
    engine = Collector(llm, requests, config)
    monkeypatch.setattr(llm, "device_type", "cuda")
    bulk = Collector(llm, requests, config)
    assert engine.bulk is None and bulk.bulk is not None
    expected = engine.answer(requests)
    assert bulk.answer(requests[:3]) + bulk.answer(requests[3:]) == expected
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}
    assert all((answer.answer_ids[-1] == EOS_ID) == (answer.finish_reason == "stop") for answer in expected)
    assert Collector(llm, requests, make_config(temperature=1.0)).bulk is None
