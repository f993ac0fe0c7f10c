"""The probe finds passes that are not exact, and names the operation. Kernels here work row by row, so they are exact
until a fault is planted."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from blockpilot.core.errors import InputError
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.probe import KINDS, ProbeReport, ProbeSizes, probe
from blockpilot.decoding.probe_passes import Pass, bits, path_to
from blockpilot.engine import llm as llm_module
from blockpilot.gpu import reference
from blockpilot.gpu import target as target_module
from blockpilot.gpu.first_difference import find_difference, fingerprint
from blockpilot.gpu.interface import AttentionLayer, Experts, Norm, Parts, PassInputs
from blockpilot.gpu.plan import WORD
from blockpilot.gpu.target import GpuTargetRunner
from tests.tiny import make_decoder, make_llm, make_placement
from tests.unit.gpu.late_device import make_gpu_llm

SIZES = ProbeSizes(
    text=80,
    starts=(1, 60),
    chains=(2, 12),
    trees=(3, 9, 20),
    cuts=(1, 7, 65),
    pieces=12,
    batches=(2, 3),
    short_texts=(5, 30, 64),
    drafts=(12, 5, 1),
)


class RowKernels:
    """The reference, one token at a time. Attention gathers the keys of a query in the order of their positions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def linear(self, x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Parts:
        product = torch.cat([reference.linear(row, weight).values for row in x.split(1)])
        return Parts(product if out is None else out.copy_(product))

    def embed(self, ids: Tensor, table: Tensor) -> Tensor:
        return reference.embed(ids, table)

    def add_norm(self, x: Tensor, delta: Parts | None, norm: Norm, convolution: None = None) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta.total
        return total, torch.cat([reference.add_norm(row, None, norm)[1] for row in total.split(1)])

    def norm_linear(self, x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Parts]:
        total, normed = self.add_norm(x, delta, norm)
        return total, self.linear(normed, weight)

    def norm_gated_linear(self, x: Tensor, delta: Parts | None, norm: Norm, weight: Tensor) -> tuple[Tensor, Tensor]:
        total, normed = self.add_norm(x, delta, norm)
        return total, torch.cat([reference.gated_linear(row, weight) for row in normed.split(1)])

    def norm_routed_mlp(self, x: Tensor, delta: Parts, norm: Norm, experts: Experts) -> tuple[Tensor, Parts]:
        total = x + delta.total
        rows = [reference.norm_routed_mlp(row, None, norm, experts)[1] for row in total.split(1)]  # type: ignore[arg-type]
        return total, Parts(torch.cat([row.values for row in rows], dim=1), rows[0].num_parts)

    def rotate_attend(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
        for token in range(len(inputs.token_ids)):
            self._store(qkv, layer, inputs, token)
        queries = torch.cat([self._store(qkv, layer, inputs, token) for token in range(len(inputs.token_ids))])
        return torch.cat([self._mix(queries, layer, inputs, token) for token in range(len(queries))])

    def _store(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs, token: int) -> Tensor:
        request, place, one = token // inputs.count, token % inputs.count, slice(token, token + 1)
        slots, starts = inputs.slots[request : request + 1], inputs.starts[request : request + 1] + place
        return reference.rotate_store(Parts(qkv.values[one]), layer, inputs.positions[one], slots, starts)

    def seen_rows(self, layer: AttentionLayer, inputs: PassInputs, token: int) -> list[int]:
        request, place = token // inputs.count, token % inputs.count
        start, own = int(inputs.starts[request]), range(place + 1)
        if inputs.masks is not None:
            words = inputs.masks[token].tolist()
            own = [bit for bit in range(inputs.count) if words[bit // WORD] >> bit % WORD & 1]  # type: ignore[assignment]
        rows = [*range(start), *(start + bit for bit in own)]
        return [min(row, layer.keys.shape[2] - 1) for row in rows]

    def _mix(self, queries: Tensor, layer: AttentionLayer, inputs: PassInputs, token: int) -> Tensor:
        slot, rows = int(inputs.slots[token // inputs.count]), self.seen_rows(layer, inputs, token)
        group = layer.num_heads // layer.keys.shape[1]
        keys, values = (x[slot][:, rows].repeat_interleave(group, 0).double() for x in layer[:2])
        scores = (queries[token].double()[:, None] * keys).sum(-1) / queries.shape[-1] ** 0.5
        return (scores.softmax(-1)[..., None] * values).sum(1).flatten()[None].to(queries.dtype)


class FaultyKernels(RowKernels):
    """The named kernel's last result is one bit off in every row where `is_wrong` says so of its arguments."""

    def __init__(self, is_wrong: Callable[..., bool], name: str) -> None:
        self.is_wrong, self.name = is_wrong, name

    def __getattribute__(self, name: str) -> Any:
        kernel = super().__getattribute__(name)
        if name in ("is_wrong", "name") or name != self.name:
            return kernel

        def run(*given: Any, **options: Any) -> Any:
            result = kernel(*given, **options)
            if self.is_wrong(*given, **options):
                last = result[-1] if type(result) is tuple else result
                _flip(last.values if isinstance(last, Parts) else last)
            return result

        return run


def _flip(values: Tensor) -> None:
    """The lowest bit of each row's first number."""
    values.view(torch.int32)[..., 0] ^= 1


def make_runner(kernels: object, name: str = "qwen3", num_slots: int = 4, context_length: int = 90) -> GpuTargetRunner:
    runner = GpuTargetRunner(make_decoder(name).requires_grad_(False), make_placement(num_slots, context_length))
    runner.fused.layers.kernels = kernels  # type: ignore[assignment]
    return runner


def run_with(is_wrong: Callable[..., bool], kernel: str, target: str = "qwen3") -> ProbeReport:
    return probe(make_runner(FaultyKernels(is_wrong, kernel), target), find_difference, sizes=SIZES)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_exact_kernels_pass(name: str) -> None:
    runner, told = make_runner(RowKernels(), name), []
    found = probe(runner, find_difference, sizes=SIZES, report=lambda what, done, total: told.append((done, total)))
    assert found.difference is None and found.num_differing == 0 == found.num_not_finite
    assert list(found.kinds) == list(KINDS)
    chains, trees = found.kinds["chains"], found.kinds["trees"]
    assert (chains.cases, chains.rows) == (4, 2 * (2 + 12)) and (trees.cases, trees.rows) == (6, 2 * (3 + 9 + 20))
    assert found.kinds["prompt cuts"].cases == 12 + 12 + 2 and found.kinds["batches"].rows > 30
    assert told[-1][0] == told[-1][1] and [done for done, _ in told] == sorted(done for done, _ in told)
    assert runner.cache.num_free == 4 and runner.cache.reserve() == 0  # slots are back, in their order


def test_all_passes_are_shown_to_be_what_they_are_called() -> None:
    """Cross the borders that the sizes are chosen for, and mix requests of several lengths."""
    runner, shapes = make_runner(RowKernels()), set()
    check = runner._check

    def note(trees: Any, *given: Any, **options: Any) -> Any:
        for slot, tree in trees:
            shapes.add((len(trees), len(tree), tree.is_chain, runner.cache.lengths[slot]))
        return check(trees, *given, **options)

    runner._check = note  # type: ignore[method-assign]
    probe(runner, find_difference, sizes=SIZES)
    assert {(1, 12, True, 60), (1, 20, False, 60), (1, 9, False, 1), (3, 5, True, 30), (4, 12, False, 80)} <= shapes
    assert {start for count, _, _, start in shapes if count == 4} == {80, 5, 30, 64}


def test_too_many_tokens_in_a_product() -> None:
    """Another order of addition, where there are more than a few tokens."""
    weights: list[Tensor] = []

    class OtherOrder(RowKernels):
        def linear(self, x: Tensor, weight: Tensor, *, out: Tensor | None = None) -> Parts:
            if weight is not weights[0] or len(x) <= 8:
                return super().linear(x, weight, out=out)
            return Parts((x[:, 1::2] @ weight[:, 1::2].T) + (x[:, ::2] @ weight[:, ::2].T))

    runner = make_runner(OtherOrder())
    weights.append(runner.decoder.layers[1].mlp.down_proj.weight)  # type: ignore[union-attr, arg-type]
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is not None and found.difference.operation == "layer 1, down product"
    assert found.difference.shape == "chain of 12 tokens, 1 request, start 1"
    assert str(found.difference).endswith(f"token {found.difference.token} differs from its plain pass")
    assert 0 < found.num_differing < found.num_rows
    assert runner.cache.num_free == 4


def test_a_tree_that_sees_one_key_too_many() -> None:
    class Curious(RowKernels):
        def seen_rows(self, layer: AttentionLayer, inputs: PassInputs, token: int) -> list[int]:
            rows = super().seen_rows(layer, inputs, token)
            is_layer = layer.keys.data_ptr() == runner.cache.rows[2, 0].data_ptr()
            is_branch = inputs.branches is not None and bool(inputs.branches[token // inputs.count])
            hidden = [row for row in range(rows[-1]) if row not in rows]
            return [*rows[:-1], *hidden[:1], rows[-1]] if is_layer and is_branch else rows

    runner = make_runner(Curious())
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is not None and found.difference.operation == "layer 2, attention"
    assert found.difference.shape == "tree of 3 tokens, 1 request, start 1" and found.difference.token == 2
    assert found.kinds["chains"].differing == 0 == found.kinds["prompt cuts"].differing
    assert found.kinds["trees"].differing > 0 and found.kinds["batches"].differing > 0


def test_one_bit_of_the_head_in_batches_alone() -> None:
    """Three requests are padded to four, with one row each in plain steps and after prompts."""
    found = run_with(lambda x, weight, out=None: out is not None and len(x) == 4, "linear")
    assert found.difference is not None and found.difference.operation == "head"
    assert found.difference.shape == "chain of 1 token, 3 requests, start 5"
    assert found.num_differing == found.kinds["batches"].differing == 3 + 4 + 2 * 3


def test_the_request_of_a_batch_that_differs_is_named() -> None:
    class Mixed(RowKernels):
        def rotate_attend(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
            mixed = super().rotate_attend(qkv, layer, inputs)
            if len(inputs.slots) > 1 and inputs.masks is not None:
                _flip(mixed[inputs.count + 4 : inputs.count + 5])  # the fifth token of the second request
            return mixed

    found = probe(make_runner(Mixed()), find_difference, sizes=SIZES)
    assert found.difference is not None
    assert str(found.difference) == (
        "layer 0, attention (chain of 5 tokens, 2 requests, start 30): token 4 differs from its plain pass"
    )
    assert found.num_differing == found.kinds["batches"].differing > 0


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("embed", "embedding"),
        ("norm_linear", "layer 0, norm and query-key-value product"),
        ("norm_gated_linear", "layer 1, norm and gated product"),
        ("norm_routed_mlp", "layer 0, routed experts"),
        ("add_norm", "layer 0, norm and query-key-value product"),
    ],
)
def test_every_operation_has_its_name(name: str, operation: str) -> None:
    """In the tiny model with experts layer 1 is dense. A norm is a part of the product behind it."""
    found = run_with(lambda x, *given, **options: len(x) == 20 + 4, name, "qwen3_moe")
    assert found.difference is not None and found.difference.operation == operation
    assert found.difference.shape == "tree of 20 tokens, 1 request, start 1"


def test_a_prompt_whose_last_token_is_right() -> None:
    """Keys and values of the others are compared, too; the first token that differs is named."""

    class Forgetful(RowKernels):
        def rotate_attend(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
            mixed = super().rotate_attend(qkv, layer, inputs)
            if inputs.masks is None and inputs.count == 16:
                _flip(mixed[5:6])
            return mixed

    runner = make_runner(Forgetful())
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is not None
    assert str(found.difference) == (
        "layer 0, attention (prompt piece of 7 tokens, 1 request, start 0): token 5 differs from its plain pass"
    )
    assert found.kinds["prompt cuts"].differing >= 12 > found.kinds["chains"].differing == 0


def test_values_that_no_logit_shows_are_compared() -> None:
    class Careless(RowKernels):
        def rotate_attend(self, qkv: Parts, layer: AttentionLayer, inputs: PassInputs) -> Tensor:
            mixed = super().rotate_attend(qkv, layer, inputs)
            if inputs.masks is None and inputs.count == 16 and int(inputs.starts[0]) == 7:
                _flip(layer.values[int(inputs.slots[0]), 0, 9:10])  # after everybody has read it
            return mixed

    found = probe(make_runner(Careless()), find_difference, sizes=SIZES)
    assert found.difference is not None and found.difference.operation is None
    assert "start 7" in found.difference.shape


def record(runner: GpuTargetRunner, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Passes keep the kernels that they were recorded with, as graphs do; `then` comes behind each."""
    layers = runner.fused.layers

    def capture(run: Callable[[], None], *given: object) -> Callable[[], None]:
        assert runner._is_recording  # nothing is recorded while an operation is looked for
        bound = layers.kernels

        def replay() -> None:
            kept, layers.kernels = layers.kernels, bound
            run()
            layers.kernels = kept
            then()

        return replay

    monkeypatch.setattr(target_module, "capture", capture)


def test_a_fault_of_the_recording_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of every pass, so that plain passes are wrong and most others right."""
    runner = make_runner(RowKernels())
    record(runner, monkeypatch, lambda: _flip(runner._logits[:1]))
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is not None and found.difference.operation is None
    assert "run kernel by kernel it does not" in str(found.difference)
    assert found.difference.token == 1 and found.difference.shape == "chain of 2 tokens, 1 request, start 1"
    assert runner._is_recording


def test_recorded_passes_are_run_again_kernel_by_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(FaultyKernels(lambda ids, table: len(ids) == 3, "embed"))
    record(runner, monkeypatch, lambda: None)
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is not None and found.difference.operation == "embedding"


def test_bits_see_zeros_and_numbers_that_are_none() -> None:
    zeros, nan = torch.zeros(1, 4, dtype=torch.bfloat16), torch.full((1, 4), float("nan"))
    assert not torch.equal(bits(zeros), bits(-zeros)) and torch.equal(zeros, -zeros)
    assert torch.equal(bits(nan), bits(nan)) and not torch.equal(nan, nan)
    assert int(fingerprint(zeros)) != int(fingerprint(-zeros))
    rows = torch.randn(3, 50)
    swapped = rows.flip(1)
    assert (fingerprint(rows) != fingerprint(swapped)).all() and torch.equal(
        fingerprint(rows)[:1], fingerprint(rows[:1])
    )


def test_logits_that_are_no_numbers_are_counted() -> None:
    runner = make_runner(RowKernels())
    runner.decoder.lm_head.weight[3] = float("inf")
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is None and found.num_not_finite > 0


def test_one_slot_and_none() -> None:
    runner = make_runner(RowKernels(), num_slots=1)
    found = probe(runner, find_difference, sizes=SIZES)
    assert found.difference is None and found.kinds["batches"].cases == 0 < found.kinds["prompt cuts"].cases
    runner.cache.reserve()
    with pytest.raises(InputError, match="all slots hold requests"):
        probe(runner, find_difference, sizes=SIZES)


def test_the_report_as_json() -> None:
    found = run_with(lambda x, *given, **options: len(x) == 3, "embed")
    value = json.loads(json.dumps(found.to_dict()))
    assert value["exact"] is False and value["difference"]["operation"] == "embedding"
    assert value["num_rows"] == sum(kind["rows"] for kind in value["kinds"].values())
    assert value["num_differing"] == sum(kind["differing"] for kind in value["kinds"].values()) > 0
    exact = dataclasses.replace(found, difference=None).to_dict()
    assert exact["exact"] is True and exact["difference"] is None


def test_shapes_in_words_and_paths() -> None:
    tree = DraftTree.build(5, [(0, 6), (0, 7), (2, 8)])
    assert path_to(tree, 3) == [0, 2, 3] and path_to(tree, 0) == [0]
    plain = DraftTree.chain(1, [])
    assert Pass([(0, plain), (3, tree)], [4, 9]).describe(1) == "tree of 4 tokens, 2 requests, start 9"
    assert Pass([(0, plain)], [4]).describe(0) == "chain of 1 token, 1 request, start 4"


def test_the_engine_on_a_cpu_says_what_to_do() -> None:
    for llm in (make_llm("llama"), make_gpu_llm("llama")):
        with pytest.raises(InputError, match=r"float32 on a CPU has no exact path.*--dtype int8"):
            llm.probe()


def test_what_keeps_a_gpu_from_being_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm_module, "has_triton", lambda: False)
    assert "pip install triton" in llm_module.why_inexact("cuda", "bfloat16", 64)
    monkeypatch.setattr(llm_module, "has_triton", lambda: True)
    assert "heads of size 512 in bfloat16" in llm_module.why_inexact("cuda", "bfloat16", 512)


def test_the_engine_probes_between_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open stream goes on as if nothing had been."""
    monkeypatch.setattr(GpuTargetRunner, "is_exact", True)
    monkeypatch.setattr(
        llm_module, "probe", lambda runner, find, **options: probe(runner, find, sizes=SIZES, **options)
    )
    llm = make_gpu_llm("llama", num_slots=3)
    llm.engine.runner.fused.layers.kernels = RowKernels()  # type: ignore[attr-defined]
    expected = llm.generate([[5, 6, 7]])[0].token_ids
    stream = llm.stream([5, 6, 7])
    updates = [next(stream), next(stream)]
    found = llm.probe()
    updates += list(stream)
    assert found.difference is None and found.num_rows > 0
    assert updates[-1].completion is not None and updates[-1].completion.token_ids == expected
