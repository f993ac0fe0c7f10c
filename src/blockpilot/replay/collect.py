"""A collection run: the traces of many prompts in a folder, shard by shard, and who made them.

The answers, the target's pass and the drafts come from the very objects that decode online, with the same packed
weights. In float32 the recorded lengths are those of online decoding, ties of the drafter excepted; in bfloat16 they
are an estimate, and the manifest says so. A run continues only what was made alike.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from blockpilot import __version__
from blockpilot.core.files import hash_file
from blockpilot.core.manifests import open_run, write_manifest
from blockpilot.core.progress import Progress, Report
from blockpilot.engine.llm import LLM
from blockpilot.models.tensor_files import SafetensorsFolder
from blockpilot.replay.collector import Collector
from blockpilot.replay.config import CollectConfig, PlacedPrompt, ReplayRequest
from blockpilot.replay.trace_files import TraceSet, shard_path, write_shard


def encode_requests(llm: LLM, prompts: Sequence[PlacedPrompt], seed: int) -> list[ReplayRequest]:
    """Each prompt's seed is `seed` plus its place."""
    encode = llm.tokenizer.encode_chat
    return [ReplayRequest(prompt.id, task, encode(prompt.text), seed + place) for task, place, prompt in prompts]


def collect(
    llm: LLM,
    requests: Sequence[ReplayRequest],
    config: CollectConfig,
    *,
    out: Path,
    report: Report,
    source: Mapping[str, Any] | None = None,
) -> TraceSet:
    """Write the traces of all requests into `out`, continuing whatever is there.

    `source` says where prompts and weights come from; like the configuration it must match to continue.
    """
    collector = Collector(llm, requests, config)
    shards = Shards(out, describe_run(collector, source or {}), report)
    for index in shards.missing:
        traces = []
        for trace in collector.trace(index):
            traces.append(trace)
            shards.progress.advance("traces")
        write_shard(shard_path(out, index), traces, config.precision)
    return shards.finish()


def describe_run(collector: Collector, source: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest of a run, apart from what it will have counted at its end."""
    llm, drafter = collector.llm, collector.drafter
    requests = json.dumps([asdict(request) for request in collector.requests])
    description = {
        "package_version": __version__,
        "target": llm.target_name,
        "drafter": drafter.name,
        **source,
        "generation": "engine" if collector.bulk is None else "bulk",
        "device": llm.device_type,
        "dtype": llm.config.dtype,
        "is_estimate": llm.config.dtype != "float32",  # one pass and many round differently
        **asdict(collector.config),
        "context_length": llm.engine.context_length,
        "vocab_size": collector.setting.vocab_size,
        "trained_block_size": drafter.block_size,
        "max_block_size": drafter.max_block_size,
        "num_requests": len(collector.requests),
        "requests_sha256": hashlib.sha256(requests.encode()).hexdigest(),
    }
    return json.loads(json.dumps(description))


def hash_weights(folder: Path) -> str:
    """Of a folder's weights: the file's own sum where there is one, else the sum of all sums in order."""
    paths = sorted(folder.glob("*.safetensors"))
    SafetensorsFolder(paths)  # refuses what is none before all of it is read
    hashes = [hash_file(path) for path in paths]
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()


class Shards:
    """The folder of a run: which of its shards are missing, and the manifest at the end."""

    def __init__(self, out: Path, identity: Mapping[str, Any], report: Report) -> None:
        open_run(out, identity, free=("package_version",))
        self.out, self.identity = out, identity
        self.num_requests, self.shard_size = identity["num_requests"], identity["shard_size"]
        everything = range(-(-self.num_requests // self.shard_size))
        self.missing = [index for index in everything if not shard_path(out, index).is_file()]
        self.progress = Progress(report, self.num_requests)
        self.progress.skip(self.num_requests - sum(map(self.count, self.missing)))

    def count(self, index: int) -> int:
        """Requests of one shard."""
        return min(self.shard_size, self.num_requests - index * self.shard_size)

    def finish(self) -> TraceSet:
        """The manifest counts what the folder holds."""
        traces = TraceSet(self.out)
        counts = [(len(trace.answer_ids), trace.num_disagreements) for trace in traces]
        found = {
            "num_traces": len(counts),
            "num_shards": len(traces.shards),
            "num_answer_tokens": sum(length for length, _ in counts),
            "num_disagreements": sum(disagreements for _, disagreements in counts),
        }
        write_manifest(self.out, {**self.identity, "is_complete": True, **found})
        return TraceSet(self.out)
