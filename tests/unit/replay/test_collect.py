"""Collecting: files that read back, runs that go on, refusals that name what differs."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.core.manifests import MANIFEST
from blockpilot.pilots.fixed import FixedPilot, TreePilot
from blockpilot.replay import collect
from blockpilot.replay.simulate import oracle_steps, simulate
from blockpilot.replay.trace_files import TraceSet, shard_path, write_shard
from blockpilot.replay.traces import ABSENT, Trace
from tests.tiny import make_dflash, make_eagle3, make_llm
from tests.unit.replay.pieces import (
    PROMPTS,
    SIZES,
    LinearCosts,
    ignore,
    make_config,
    make_pair,
    make_requests,
    run_collect,
    shapes,
)


def assert_same(first: Trace, second: Trace) -> None:
    for name in ("prompt_id", "task", "num_prompt_tokens", "temperature", "seed", "max_new_tokens", "finish_reason"):
        assert getattr(first, name) == getattr(second, name)
    np.testing.assert_array_equal(first.answer_ids, second.answer_ids)
    np.testing.assert_array_equal(first.emitted, second.emitted)
    assert vars(first.prefill).keys() == vars(second.prefill).keys()
    assert (first.prefill.logits is None) == (second.prefill.logits is None)
    for name, value in vars(first.prefill).items():
        if value is None:
            continue
        np.testing.assert_allclose(value, getattr(second.prefill, name), rtol=1e-6)
    assert list(first.drafts) == list(second.drafts)
    for size, draft in first.drafts.items():
        for name, value in vars(draft).items():
            np.testing.assert_array_equal(value, getattr(second.drafts[size], name))


@pytest.mark.parametrize("is_second", [False, True])
def test_traces_read_back_as_they_were(is_second: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time with all logits of the first token."""
    written: list[Trace] = []

    def write(path: Path, traces: list[Trace], precision: str) -> None:
        written.extend(traces)
        write_shard(path, traces, precision)

    monkeypatch.setattr(collect, "write_shard", write)
    found = run_collect(make_pair(is_second=is_second), tmp_path, temperature=1.0, whole_logits=is_second)
    assert len(found) == len(PROMPTS) and found.is_complete and len(found.shards) == 3
    for first, second in zip(written, found, strict=True):
        assert_same(first, second)
        assert second.emitted.shape == (second.num_anchors, len(SIZES)) and (second.emitted >= 1).all()
        draft = second.draft(8)
        assert draft.log_probs.shape == (second.num_anchors, 7, 5) and draft.entropy.shape == (second.num_anchors, 7)
        assert (draft.pairwise is not None) == is_second
        assert (second.prefill.logits is not None) == is_second == (second.prefill_state().logits is not None)
        beyond = np.arange(second.num_anchors)[:, None] + np.arange(1, 8) > second.num_anchors
        assert (draft.true_ranks[beyond] == ABSENT).all() and (draft.true_ranks < 5).any()
    assert found.manifest["num_answer_tokens"] == sum(len(trace.answer_ids) for trace in written)


def test_half_precision_halves_and_stays_close(tmp_path: Path) -> None:
    llm = make_pair()
    whole = next(iter(run_collect(llm, tmp_path / "whole", count=1)))
    half = next(iter(run_collect(llm, tmp_path / "half", count=1, precision="float16")))
    assert half.draft(8).log_probs.dtype == half.prefill.hidden.dtype == np.float16
    np.testing.assert_allclose(half.draft(8).log_probs, whole.draft(8).log_probs, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(half.emitted, whole.emitted)
    state = replace(whole.prefill, hidden=np.full(32, 1e6, np.float32))
    write_shard(shard_path(tmp_path / "half", 0), [replace(whole, prefill=state)], "float16")
    assert np.isfinite(next(iter(TraceSet(tmp_path / "half"))).prefill.hidden).all()


def test_a_run_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    llm = make_pair()
    run_collect(llm, tmp_path, temperature=1.0)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    shard_path(tmp_path, 1).unlink()
    said: list[tuple[str, int, int]] = []
    config = make_config(temperature=1.0)
    collect.collect(llm, make_requests(llm), config, out=tmp_path, report=lambda *words: said.append(words))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert [(done, total) for _, done, total in said] == [(4, 5), (5, 5)] and "left" in said[0][0]
    assert llm.engine.runner.cache.num_free == 4


def test_an_interrupted_run_keeps_its_finished_shards(tmp_path: Path) -> None:
    llm = make_pair()

    def interrupt(what: str, done: int, total: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collect.collect(llm, make_requests(llm), make_config(), out=tmp_path, report=interrupt)
    partial = TraceSet(tmp_path)
    assert len(partial) == 2 and not partial.is_complete
    assert len(run_collect(llm, tmp_path)) == len(PROMPTS)


def test_another_configuration_is_refused_by_name(tmp_path: Path) -> None:
    llm = make_pair()
    run_collect(llm, tmp_path, count=1)
    with pytest.raises(InputError, match=r"num_candidates is 5 there and 4 here; choose another --out"):
        run_collect(llm, tmp_path, count=1, num_candidates=4)
    with pytest.raises(InputError, match=r"num_requests is 1 there and 2 here"):
        run_collect(llm, tmp_path, count=2)
    with pytest.raises(InputError, match=r"requests_sha256"):
        other = make_requests(llm, 1, seed=4)
        collect.collect(llm, other, make_config(), out=tmp_path, report=ignore)


def test_other_schemas_and_damage_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no traces: run `blockpilot collect"):
        TraceSet(tmp_path)
    run_collect(make_pair(), tmp_path, count=1)
    path, shard = tmp_path / MANIFEST, shard_path(tmp_path, 0)
    text, whole = path.read_text(encoding="utf-8"), shard.read_bytes()
    path.write_text(json.dumps(json.loads(text) | {"schema_version": 99}), encoding="utf-8")
    with pytest.raises(InputError, match=r"schema version 99, this program reads 1"):
        TraceSet(tmp_path)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(InputError, match="not valid JSON"):
        TraceSet(tmp_path)
    path.write_text(text, encoding="utf-8")
    shard.write_bytes(whole[:100])
    with pytest.raises(InputError, match=r"shard-00000.safetensors is damaged"):
        list(TraceSet(tmp_path))


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("is_second", [False, True])
def test_visited_anchors_equal_every_anchor_along_the_walk(is_second: bool, temperature: float, tmp_path: Path) -> None:
    llm = make_pair(is_second=is_second)
    every = run_collect(llm, tmp_path / "every", temperature=temperature)
    visited = run_collect(llm, tmp_path / "visited", temperature=temperature, anchors="visited", draft_sizes=())
    for full, sparse in zip(every, visited, strict=True):
        for column, size in enumerate(SIZES):
            steps = simulate(full, FixedPilot(size))
            assert shapes(simulate(sparse, FixedPilot(size))) == shapes(steps)
            assert np.flatnonzero(sparse.emitted[:, column]).tolist() == [step.anchor for step in steps]
    assert llm.engine.runner.cache.num_free == 4 and not any(llm.drafter.cache.lengths)  # type: ignore[union-attr]
    with pytest.raises(InputError, match=r"no candidates of draft size 8; it holds none"):
        simulate(sparse, TreePilot(3))
    with pytest.raises(InputError, match=r"needs traces of every anchor"):
        oracle_steps(sparse, LinearCosts())


def test_answers_of_one_token_have_no_anchor(tmp_path: Path) -> None:
    found = list(run_collect(make_pair(), tmp_path, max_new_tokens=1, temperature=1.0))
    assert all(trace.num_anchors == 0 and simulate(trace, FixedPilot(8)) == [] for trace in found)
    assert found[0].draft(8).log_probs.shape == (0, 7, 5)


def test_passes_may_be_cut_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_pair()
    whole = list(run_collect(llm, tmp_path / "whole", count=2))
    monkeypatch.setattr("blockpilot.replay.anchor_drafts.LOGITS_PER_PASS", {"cpu": 61 * 24})
    for first, second in zip(whole, run_collect(llm, tmp_path / "cut", count=2), strict=True):
        np.testing.assert_array_equal(first.emitted, second.emitted)
        np.testing.assert_allclose(first.draft(8).pairwise, second.draft(8).pairwise, atol=1e-4)


def test_half_precision_models_give_an_estimate(tmp_path: Path) -> None:
    found = run_collect(make_pair(dtype="float16"), tmp_path, temperature=1.0, count=2)
    assert found.manifest["is_estimate"] and found.manifest["generation"] == "engine"
    assert all(sum(step.emitted for step in simulate(trace, TreePilot(5))) == trace.num_anchors for trace in found)


def test_a_reduced_head_replays_as_it_decodes(tmp_path: Path) -> None:
    """From packed weights, one block at a time online and many together here."""
    model = make_dflash(is_second=True)
    model.draft_token_ids = torch.arange(0, 60, 2)
    llm = make_llm(drafter=model, linear_backend="auto")
    for trace, request in zip(run_collect(llm, tmp_path, temperature=4.0), make_requests(llm), strict=True):
        params = make_config(temperature=4.0).params(request.seed)
        for size in (3, 8):
            online = llm.generate([request.prompt_ids], params, pilot=FixedPilot(size))[0]
            assert shapes(simulate(trace, FixedPilot(size))) == shapes(online.steps)


@pytest.mark.parametrize("temperature", [0.0, 4.0])
@pytest.mark.parametrize("name", ["llama-int8", "qwen3_moe-int8"])
def test_8_bit_integers_give_the_answers_of_decoding_and_an_estimate_of_drafts(
    name: str, temperature: float, tmp_path: Path
) -> None:
    """At visited anchors the drafter runs as it does online; at every anchor it runs in PyTorch."""
    model = make_dflash(name, is_second=True)
    model.draft_token_ids = torch.arange(0, 60, 2)
    llm = make_llm(name, drafter=model)
    visited = run_collect(llm, tmp_path / "visited", temperature=temperature, anchors="visited", draft_sizes=())
    for trace, request in zip(visited, make_requests(llm), strict=True):
        params = make_config(temperature=temperature).params(request.seed)
        for size in (3, 8):
            online = llm.generate([request.prompt_ids], params, pilot=FixedPilot(size))[0]
            assert online.token_ids == trace.answer_ids.tolist()
            assert shapes(simulate(trace, FixedPilot(size))) == shapes(online.steps)
    every = run_collect(llm, tmp_path / "every", temperature=temperature)
    assert every.manifest["is_estimate"] and every.manifest["num_disagreements"] == 0
    assert all(sum(step.emitted for step in simulate(trace, TreePilot(5))) == trace.num_anchors for trace in every)
    for first, second in zip(visited, every, strict=True):
        np.testing.assert_array_equal(first.prefill.probabilities, second.prefill.probabilities)
    assert llm.engine.runner.cache.num_free == 4


def test_the_context_limits_an_answer(tmp_path: Path) -> None:
    llm = make_pair(context_length=24)
    trace = next(iter(run_collect(llm, tmp_path, count=1, temperature=4.0)))
    assert trace.max_new_tokens == 24 - trace.num_prompt_tokens
    request = replace(make_requests(llm)[0], prompt_ids=[1] * 24)
    with pytest.raises(InputError, match=r"prompt p0 of tiny has 24 tokens and the context holds 24"):
        collect.collect(llm, [request], make_config(), out=tmp_path, report=ignore)


@pytest.mark.parametrize("drafter", ["ngram", None, "eagle3"])
def test_other_drafters_are_refused(drafter: str | None, tmp_path: Path) -> None:
    llm = make_llm(drafter=make_eagle3() if drafter == "eagle3" else drafter)
    with pytest.raises(InputError, match=r"replay needs a DFlash drafter, got"):
        run_collect(llm, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"sizes": (1, 4)}, "block size 1: sizes lie between 2 and 64"),
        ({"sizes": (65,)}, "block size 65"),
        ({"sizes": ()}, "give at least one"),
        ({"draft_sizes": (4,)}, "draft size 4 is not among the sizes 2, 3, 5, 8, 13"),
        ({"num_candidates": 0}, "candidates must lie between 1 and 254"),
        ({"anchors": "some"}, "unknown anchors 'some'; known: every, visited"),
        ({"anchors": "visited"}, "candidates are kept at every anchor or not at all"),
        ({"precision": "int8"}, "unknown precision 'int8'"),
        ({"shard_size": 0}, "--shard-size must be at least 1"),
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], line: str) -> None:
    with pytest.raises(InputError, match=line):
        make_config(**settings)
