"""The probe on a CPU: every instruction set is exact, and planted faults are found and named."""

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from blockpilot.core.tree import DraftTree
from blockpilot.cpu.first_difference import find_difference
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.cpu.tokens import Tokens
from blockpilot.decoding.probe import KINDS, ProbeReport, ProbeSizes, probe
from blockpilot.engine import llm as llm_module
from blockpilot.models.packing import pack_linears
from tests.tiny import CODED, make_decoder, make_llm
from tests.unit.cpu.pieces import make_runner
from tests.unit.native.pieces import RUNNABLE

SIZES = ProbeSizes(
    text=150,
    starts=(1, 15, 60, 140),
    chains=(2, 12),
    trees=(3, 9, 40),
    cuts=(1, 7, 64, 150),
    pieces=12,
    batches=(2, 5),
    short_texts=(5, 30, 64, 17),
    drafts=(12, 5, 1, 33),
)
FOURTH = "chain of 12 tokens, 1 request, start 1"


def run_probe(runner: CpuTargetRunner) -> ProbeReport:
    return probe(runner, find_difference, sizes=SIZES)


@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("instructions", RUNNABLE)
def test_every_instruction_set_is_exact(name: str, instructions: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BLOCKPILOT_CPU", instructions)
    runner = make_runner(name, num_slots=6)
    assert runner.kernels.name == instructions
    found = run_probe(runner)
    assert found.difference is None and found.num_differing == 0 == found.num_not_finite
    assert list(found.kinds) == list(KINDS) and all(counts.rows > 20 for counts in found.kinds.values())


@pytest.mark.parametrize("num_threads", [2, 3])
def test_threads_that_share_a_pass(num_threads: int) -> None:
    assert run_probe(make_runner("qwen3_moe-int8", num_slots=6, num_threads=num_threads)).difference is None


def test_ancestors_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only nodes whose paths are long enough see it."""
    add_tree = Tokens.add_tree

    def add(self: Tokens, slot: int, start: int, tree: DraftTree) -> None:
        first = len(self.lists)
        add_tree(self, slot, start, tree)
        if not tree.is_chain:
            for node, begin in enumerate(self.list_starts[-len(tree) :]):
                if tree.depths[node] > 1 and begin >= first:
                    self.lists[begin : begin + 2] = self.lists[begin : begin + 2][::-1]

    monkeypatch.setattr(Tokens, "add_tree", add)
    found = run_probe(make_runner())
    assert found.difference is not None and found.difference.operation == "layer 0"
    assert found.difference.shape == "tree of 9 tokens, 1 request, start 1"
    assert found.kinds["trees"].differing > 0 and found.kinds["batches"].differing > 0
    assert found.kinds["chains"].differing == 0 == found.kinds["prompt cuts"].differing


def spoil(monkeypatch: pytest.MonkeyPatch, runner: CpuTargetRunner, fault: Callable[..., None]) -> None:
    """`fault` is told of every pass: what goes in beforehand, then what comes out."""
    forward = runner.kernels.forward

    def run(space: Any, model: Any, cache: Any, batch: Any, wanted: Any) -> None:
        fault(batch, wanted, is_done=False)
        forward(space, model, cache, batch, wanted)
        fault(batch, wanted, is_done=True)

    monkeypatch.setattr(runner.kernels, "forward", run)


def integers(address: int, count: int) -> Any:
    return (ctypes.c_int32 * count).from_address(address)


def test_one_bit_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(batch: Any, wanted: Any, *, is_done: bool) -> None:
        if is_done and wanted.count == 12 == batch.count:
            integers(wanted.logits, 4 * 61 + 1)[4 * 61] ^= 1

    runner = make_runner()
    spoil(monkeypatch, runner, flip)
    found = run_probe(runner)
    assert str(found.difference) == f"head ({FOURTH}): token 4 differs from its plain pass"
    assert found.num_differing == found.kinds["chains"].differing + found.kinds["batches"].differing


def test_one_bit_of_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of the recorded rows whose bits differ is named, though its logits were still right."""

    def flip(batch: Any, wanted: Any, *, is_done: bool) -> None:
        if is_done and wanted.count == 12 == batch.count:
            integers(wanted.logits, 4 * 61 + 1)[4 * 61] ^= 1
            if batch.num_taps == 3:
                integers(batch.taps, 12 * 3 * 64)[2 * 3 * 64 + 64] ^= 1

    runner = make_runner()
    spoil(monkeypatch, runner, flip)
    found = run_probe(runner)
    assert str(found.difference) == f"layer 1 ({FOURTH}): token 2 differs from its plain pass"


def test_a_prompt_that_is_read_from_a_wrong_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def shift(batch: Any, wanted: Any, *, is_done: bool) -> None:
        if not is_done and batch.count == 64 and wanted.count == 1:
            integers(batch.positions, 64)[40] += 1

    runner = make_runner()
    spoil(monkeypatch, runner, shift)
    found = run_probe(runner)
    assert str(found.difference) == (
        "layer 0 (prompt piece of 64 tokens, 1 request, start 0): token 40 differs from its plain pass"
    )
    assert found.kinds["prompt cuts"].differing > 0 == found.kinds["trees"].differing


def test_an_engine_probes_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open stream goes on as if nothing had been."""
    monkeypatch.setattr(
        llm_module, "probe", lambda runner, find, **options: probe(runner, find, sizes=SIZES, **options)
    )
    llm = make_llm("qwen3-int8")
    expected = llm.generate([[5, 6, 7]])[0].token_ids
    stream = llm.stream([5, 6, 7])
    updates = [next(stream), next(stream)]
    found = llm.probe()
    updates += list(stream)
    assert llm.is_exact and found.difference is None and found.num_rows > 0
    assert updates[-1].completion is not None and updates[-1].completion.token_ids == expected


def test_infinities_are_counted() -> None:
    decoder = make_decoder("llama-untied-int8")
    decoder.norm.weight.data[3] = float("inf")
    pack_linears(decoder, "int8")
    found = run_probe(make_runner(decoder=decoder))
    assert found.difference is None and found.num_not_finite > 0
