"""Stand-ins for vLLM's objects: only what the plugin touches."""

from types import SimpleNamespace
from typing import Any

from blockpilot.integrations.vllm.steering import Row, Steering
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.fixed import FixedPilot

NUM_DRAFT_TOKENS = 7


def make_config(**options: Any) -> SimpleNamespace:
    values: dict[str, Any] = {
        "additional_config": {},
        "use_v2_model_runner": False,
        "scheduler_config": SimpleNamespace(async_scheduling=False),
        "model_config": SimpleNamespace(
            model="models/target", dtype="torch.float32", quantization=None, enforce_eager=True
        ),
        "parallel_config": SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        "speculative_config": SimpleNamespace(
            method="dflash",
            model="models/drafter",
            num_speculative_tokens=NUM_DRAFT_TOKENS,
            draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(block_size=8)),
        ),
    }
    return SimpleNamespace(**values | options)


def make_row(request_id: str = "a", **options: Any) -> Row:
    values = {"num_prompt_tokens": 10, "num_answer_tokens": 1, "num_emitted": 1, "max_answer_tokens": 100}
    return Row(request_id=request_id, **values | options)


def make_steering(*pilots: Pilot, **overrides: Pilot) -> Steering:
    """The first pilot is the configured one; overrides go by name."""
    configured = pilots[0] if pilots else FixedPilot(4)
    return Steering(
        lambda override: overrides[override] if isinstance(override, str) else configured,
        num_draft_tokens=NUM_DRAFT_TOKENS,
        trained_block_size=8,
    )
