"""From settings and a loaded target to what runs."""

import pytest
import torch

from blockpilot import LLM, EngineConfig
from blockpilot.core.errors import InputError
from blockpilot.cpu.dflash import CpuDFlashDrafter
from blockpilot.cpu.target import CpuTargetRunner
from blockpilot.decoding.dflash_drafter import DFlashDrafter
from blockpilot.decoding.target import TargetRunner
from blockpilot.engine.assemble import settle_dtype
from tests.tiny import make_dflash, make_llm, make_target


@pytest.mark.parametrize(("name", "dtype"), [("llama", "float32"), ("llama-int8", "int8")])
def test_the_dtype_is_the_targets_unless_it_is_given(name: str, dtype: str) -> None:
    assert settle_dtype(EngineConfig(), make_target(name)).dtype == dtype
    assert settle_dtype(EngineConfig(dtype=dtype), make_target(name)).dtype == dtype


@pytest.mark.parametrize(("name", "dtype"), [("llama", "int8"), ("llama-int8", "float32"), ("llama-int8", "bfloat16")])
def test_codes_and_values_are_not_mixed_up(name: str, dtype: str) -> None:
    loaded = make_target(name).dtype
    with pytest.raises(InputError, match=rf"was loaded for {loaded}, not for {dtype}: load it again"):
        LLM(make_target(name), drafter=None, config=EngineConfig(dtype=dtype))


def test_float_targets_may_run_in_any_float_dtype() -> None:
    assert make_llm("llama", dtype="bfloat16").engine.runner.decoder.embed_tokens.weight.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "runner", "drafter"),
    [("llama", TargetRunner, DFlashDrafter), ("qwen3_moe-int8", CpuTargetRunner, CpuDFlashDrafter)],
)
def test_the_target_settles_how_a_pair_runs(name: str, runner: type, drafter: type) -> None:
    llm = make_llm(name, drafter=make_dflash(name))
    assert type(llm.engine.runner) is runner and type(llm.drafter) is drafter
    assert llm.is_exact == (runner is CpuTargetRunner)


def test_engines_may_share_a_target_in_codes() -> None:
    target = make_target("llama-int8")
    config = EngineConfig(num_slots=1, context_length=100)
    first, second = (LLM(target, drafter="ngram", pilot="ar", config=config) for _ in range(2))
    assert first.generate([[1, 2, 3]])[0].token_ids == second.generate([[1, 2, 3]])[0].token_ids
