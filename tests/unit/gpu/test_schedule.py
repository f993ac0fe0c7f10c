"""Which sums are cut where: what belongs to a weight or a position, and that kernels keep to it."""

import importlib.util
import os
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from blockpilot.gpu.buckets import CHECK_TOKENS, PROMPT_TOKENS
from blockpilot.gpu.device import MAX_SHARED_ROW
from blockpilot.gpu.schedule import (
    CHUNK,
    GROUP_CHUNKS,
    LARGE_MEMORY,
    MAX_FEW,
    MIN_TILE,
    SMALL_MEMORY,
    SPLIT_UNIT,
    adds_parts,
    next_power,
    num_splits,
    part_size,
    plan_attention,
    plan_linear,
    product_dtype,
)

HERE = Path(__file__).parent
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
sizes = st.integers(1, 40000)


@given(num_rows=sizes, size=sizes)
def test_parts_cover_the_inner_size_once_and_in_order(num_rows: int, size: int) -> None:
    splits = num_splits(num_rows, size)
    begins = [part * part_size(size, splits) for part in range(splits)]
    assert all(begin % SPLIT_UNIT == 0 for begin in begins)
    assert begins[-1] < size <= begins[-1] + part_size(size, splits)  # the last part is not empty, and is the last


def test_a_weight_is_cut_by_its_shape_alone() -> None:
    assert list(signature(num_splits).parameters) == ["num_rows", "size"]
    assert num_splits(2560, 9728) > 1 and num_splits(6144, 2560) == num_splits(100, 200) == 1


@given(splits=st.integers(1, 20), dtype=st.sampled_from(DTYPES))
def test_parts_keep_their_precision_until_they_are_added(splits: int, dtype: torch.dtype) -> None:
    assert product_dtype(splits, dtype) == (torch.float32 if splits > 1 else dtype)


@given(
    num_tokens=st.one_of(st.integers(1, 300), st.integers(1, 5000)),
    num_rows=sizes,
    size=sizes,
    dtype=st.sampled_from(DTYPES),
    is_gated=st.booleans(),
    can_tile=st.booleans(),
)
def test_tiles_of_any_pass_end_where_parts_do(
    num_tokens: int, num_rows: int, size: int, dtype: torch.dtype, is_gated: bool, can_tile: bool
) -> None:
    splits = 1 if is_gated else num_splits(num_rows, size)
    is_added = splits > 1 and adds_parts(num_tokens, num_rows)
    plan = plan_linear(
        num_tokens, num_rows, size, dtype, splits=splits, is_gated=is_gated, is_added=is_added, can_tile=can_tile
    )
    assert SPLIT_UNIT % plan.depth == 0
    for side in (plan.tokens, plan.rows, plan.depth):
        assert side >= MIN_TILE and side == next_power(side)


@given(num_tokens=st.integers(1, 5000), num_rows=sizes)
def test_parts_are_added_at_once_for_many_tokens_only(num_tokens: int, num_rows: int) -> None:
    assert num_tokens > MAX_FEW or not adds_parts(num_tokens, num_rows)


@given(
    num_requests=st.integers(1, 256),
    num_kv_heads=st.sampled_from([1, 2, 3, 8, 32]),
    count=st.sampled_from(sorted({*CHECK_TOKENS, *PROMPT_TOKENS, 14, 15, 17, 18})),
    group=st.integers(1, 16),
    row_bytes=st.sampled_from([32, 128, 256, 512, 1024]),
    context=st.sampled_from([2048, 1 << 30]),
    is_prompt=st.booleans(),
    can_branch=st.booleans(),
    memory=st.sampled_from([LARGE_MEMORY, SMALL_MEMORY]),
)
def test_programs_of_attention_take_whole_chunks_or_groups(
    num_requests: int,
    num_kv_heads: int,
    count: int,
    group: int,
    row_bytes: int,
    context: int,
    is_prompt: bool,
    can_branch: bool,
    memory: int,
) -> None:
    plan = plan_attention(
        num_requests,
        num_kv_heads,
        count * group,
        row_bytes,
        context=context,
        is_prompt=is_prompt,
        can_branch=can_branch,
        processors=132,
        memory=memory,
    )
    assert plan.unit in (0, 1, GROUP_CHUNKS) and CHUNK % plan.tile == 0 and plan.tile >= MIN_TILE
    if memory == LARGE_MEMORY or row_bytes <= MAX_SHARED_ROW:
        assert (plan.tile + 2 * CHUNK * plan.num_stages) * row_bytes <= memory


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("which", ["attention", "not attention"])
def test_kernels_in_the_interpreter(which: str) -> None:
    """In a process of its own: see there."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(HERE / "interpreted.py"),
        "-k",
        which,
    ]
    ran = subprocess.run(
        command, cwd=HERE.parents[2], env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
