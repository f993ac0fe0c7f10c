"""Packed models and their runners, plain reading to compare with, and random trees."""

from collections.abc import Sequence
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from blockpilot.core.tree import DraftTree
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.plain_reading import make_tree
from blockpilot.decoding.probe_passes import path_to, read_token
from blockpilot.models.decoder import Decoder
from blockpilot.models.packing import pack_linears
from blockpilot.native.library import open_kernels
from tests.tiny import VOCAB_SIZE, make_decoder, make_placement

seeds = st.integers(0, 2**32)


@cache
def packed_decoder(name: str) -> Decoder:
    decoder = make_decoder(name)
    pack_linears(decoder, "int8")
    return decoder


def make_runner(
    name: str = "llama-int8",
    *,
    decoder: Decoder | None = None,
    num_slots: int = 4,
    context_length: int = 200,
    num_threads: int = 1,
) -> CpuTargetRunner:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blockpilot.models.packing.machine_kernels", lambda: open_kernels(num_threads))
        return CpuTargetRunner(decoder or packed_decoder(name), make_placement(num_slots, context_length, "int8"))


def draw_ids(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCAB_SIZE) for _ in range(count)]


def draw_tree(random: Random, count: int) -> DraftTree:
    """Anything between a chain and a star."""
    reach = random.randint(1, count)
    parents = [-1, *(random.randint(max(0, node - reach), node - 1) for node in range(1, count))]
    return make_tree(draw_ids(random, count), parents)


def fill(runner: CpuTargetRunner, random: Random, length: int) -> tuple[int, list[int]]:
    """A slot, and a text of that length that it holds."""
    slot, ids = runner.cache.reserve(), draw_ids(random, length)
    runner.prefill([(slot, ids)], ())
    return slot, ids


def read_plainly(runner: CpuTargetRunner, slot: int, ids: Sequence[int]) -> Tensor:
    """Logits [n, V] of tokens behind what the slot holds, each read in a pass of its own."""
    return torch.stack([read_token(runner, slot, token_id).clone() for token_id in ids])


def read_tree(runner: CpuTargetRunner, text: Sequence[int], tree: DraftTree) -> Tensor:
    """Logits [nodes, V] at the end of each node's path behind a text, read plainly in a slot of its own."""
    slot = runner.cache.reserve()
    read_plainly(runner, slot, text)
    found = []
    for node in range(len(tree)):
        found.append(read_plainly(runner, slot, [tree.token_ids[at] for at in path_to(tree, node)])[-1])
        runner.cache.rewind(slot, len(text))
    runner.cache.free(slot)
    return torch.stack(found)
