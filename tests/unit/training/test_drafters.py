"""Untrained drafters follow their run and target; a start from other weights checks every shape."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockpilot.core.errors import InputError
from blockpilot.models.dflash_format import save_dflash
from blockpilot.models.eagle3_format import save_eagle3
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.drafters import build_dflash, build_eagle3, choose_mask_token, frequent_tokens, spread_taps
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.setup import check_data, split_texts
from tests.tiny import EOS_ID, make_eagle3
from tests.unit.training.pieces import chat_target, counting_texts

RUN = DrafterRun(layers=1, taps=2, block_size=4, min_block_size=4, steps=1)


@pytest.mark.parametrize(
    ("num_layers", "count", "taps"),
    [(36, 5, (1, 9, 17, 25, 33)), (30, 1, (15,)), (3, 5, (0, 1, 2)), (5, 2, (1, 2)), (1, 3, (0,))],
)
def test_spread_taps(num_layers: int, count: int, taps: tuple[int, ...]) -> None:
    assert spread_taps(num_layers, count) == taps


def test_heads_keep_what_answers_use_and_their_end() -> None:
    texts = ResponseSet.from_responses([Response([5] * 9 + [7, 7, 8, 9, 9, 9], 9)])
    assert frequent_tokens(3, chat_target(), texts).tolist() == [EOS_ID, 7, 9]
    head = build_eagle3(replace(RUN, kind="eagle3", head_size=3), chat_target(), texts)
    assert head.draft_token_ids.tolist() == [EOS_ID, 7, 9]
    assert build_dflash(replace(RUN, head_size=3), chat_target(), texts).draft_token_ids.tolist() == [EOS_ID, 7, 9]
    assert build_dflash(RUN, chat_target(), texts).draft_token_ids is None


def test_the_mask_is_a_token_that_no_text_uses() -> None:
    texts = ResponseSet.from_responses([Response([1, 60, 59, 2], 2)])
    assert choose_mask_token(chat_target(), texts) == 58
    everything = ResponseSet.from_responses([Response(list(range(61)), 2)])
    assert choose_mask_token(chat_target(), everything) == 60


@pytest.mark.parametrize("kind", ["dflash", "dflash2"])
def test_training_starts_from_an_earlier_drafter(tmp_path: Path, kind: str) -> None:
    run, texts = replace(RUN, kind=kind), counting_texts()
    first = build_dflash(run, chat_target(), texts)
    save_dflash(first, tmp_path)
    second = build_dflash(replace(run, start_from=str(tmp_path)), chat_target(), texts)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert all(parameter.requires_grad for parameter in second.parameters())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"layers": 2}, "num_layers is 1 there, 2 here"),
        ({"intermediate_size": 24}, "intermediate_size is 48 there, 24 here"),
        ({"block_size": 6}, "block_size is 4 there, 6 here"),
        ({"taps": (0, 1)}, r"tap_layers is \(0, 2\) there, \(0, 1\) here"),
        ({"kind": "dflash2"}, "conv_kernel_size is 0 there, 2 here"),
        ({"head_size": 10}, "head_size is 61 there, 10 here"),
    ],
)
def test_a_start_of_another_shape_is_refused(tmp_path: Path, changes, line: str) -> None:
    save_dflash(build_dflash(RUN, chat_target(), counting_texts()), tmp_path)
    run = replace(RUN, start_from=str(tmp_path), **changes)
    with pytest.raises(InputError, match=f"has another shape: {line}"):
        build_dflash(run, chat_target(), counting_texts())


def test_a_start_of_another_kind_is_refused(tmp_path: Path) -> None:
    save_eagle3(make_eagle3(), tmp_path)
    with pytest.raises(InputError, match="--start-from takes DFlash drafters only"):
        build_dflash(replace(RUN, start_from=str(tmp_path)), chat_target(), counting_texts())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"kind": "medusa"}, "unknown kind 'medusa'"),
        ({"layers": 0}, "--layers must be at least 1, got 0"),
        ({"head_size": -1}, "--head-size must be at least 0, got -1"),
        ({"learning_rate": float("nan")}, "--learning-rate must be above 0"),
        ({"block_size": 65}, "--block-size must lie between 2 and 64, got 65"),
        ({"min_block_size": 5}, "--min-block-size must lie between 2 and 4, got 5"),
        ({"kind": "eagle3", "start_from": "x"}, "--start-from takes DFlash drafters only"),
    ],
)
def test_bad_runs_are_refused(changes, line: str) -> None:
    with pytest.raises(InputError, match=line):
        replace(RUN, **changes)


def test_taps_beyond_the_target() -> None:
    with pytest.raises(InputError, match=r"--taps \[3\]: the target has 3 layers"):
        build_dflash(replace(RUN, taps=(0, 3)), chat_target(), counting_texts())


def test_text_of_another_model_is_refused() -> None:
    decoder = chat_target().decoder
    with pytest.raises(InputError, match=r"agrees with only \d+% of the training answers"):
        check_data(decoder, counting_texts(), width=40)
    with pytest.raises(InputError, match="agrees with only nan%"):
        check_data(decoder, ResponseSet.from_responses([Response([1, 2], 2)]), width=40)


def test_held_out_texts_are_the_last_ones() -> None:
    texts, held_out = split_texts(counting_texts(24), limit=5)
    assert (len(texts), len(held_out)) == (5, 1)
    assert torch.equal(held_out.token_ids, counting_texts(24).slice(23, 24).token_ids)
    with pytest.raises(InputError, match="1 texts are too few"):
        split_texts(counting_texts(1), limit=0)
