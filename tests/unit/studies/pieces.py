"""Made-up traces: a request's prefill names the block size that suits it."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from blockpilot.core.manifests import write_manifest
from blockpilot.replay.trace_files import shard_path, write_shard
from blockpilot.replay.traces import PrefillColumns, Trace, TraceSetting

SIZES = tuple(range(12, 21))
VOCAB_SIZE = 24
SETTING = TraceSetting(sizes=SIZES, trained_block_size=16, max_block_size=32, vocab_size=VOCAB_SIZE)


def make_trace(name: str, best: int, *, task: str = "made-up", num_anchors: int = 96) -> Trace:
    """Every step emits 8 tokens at the best size and one less for each size it is away from it."""
    emitted = np.array([[max(1, 8 - abs(size - best)) for size in SIZES]] * num_anchors)
    emitted = np.minimum(emitted, num_anchors - np.arange(num_anchors)[:, None])
    return Trace(
        prompt_id=name,
        task=task,
        num_prompt_tokens=5,
        answer_ids=np.arange(num_anchors + 1, dtype=np.int32),
        temperature=0.0,
        seed=0,
        max_new_tokens=num_anchors + 50,
        finish_reason="eos",
        num_disagreements=0,
        emitted=emitted.astype(np.uint8),
        prefill=PrefillColumns(
            token_ids=np.array([best, 0], dtype=np.int32),
            probabilities=np.array([0.9, 0.1], dtype=np.float32),
            mass=1.0,
            entropy=0.3,
            hidden=np.eye(VOCAB_SIZE, dtype=np.float16)[best],
        ),
        drafts={},
        setting=SETTING,
    )


def write_traces(folder: Path, traces: Sequence[Trace]) -> Path:
    write_shard(shard_path(folder, 0), traces, "float16")
    setting = {"sizes": SIZES, "trained_block_size": 16, "max_block_size": 32, "vocab_size": VOCAB_SIZE}
    pair = {"target": "tiny", "drafter": "made-up", "dtype": "float32", "temperature": 0.0}
    write_manifest(folder, {**setting, **pair, "anchors": "every", "draft_sizes": [], "is_complete": True})
    return folder
