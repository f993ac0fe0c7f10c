"""What it costs to know the emitted lengths of several block sizes: replay against one generation per size.

    python benchmarks/replay.py --prompts FILE [--device cuda] [--num-prompts 4] [--max-new-tokens 128]

One run, the same prompts and engine: six generations at fixed sizes (each knows only the anchors it visited), then one
collection by replay at every anchor, then one at visited anchors alone. Collections count everything, from the
generation of the answers to the files. Prints one JSON object per way and one of ratios. On a GPU at temperature 0
replay writes its answers in bulk; `--slots` bounds how many requests the engine decodes together.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from blockpilot import LLM, EngineConfig
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay.collect import collect
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.simulate import walk_chain
from blockpilot.replay.trace_files import TraceSet
from blockpilot.text.prompts import read_prompts


def timed(llm: LLM, work: Callable[[], object]) -> tuple[float, object]:
    started = time.perf_counter()
    found = work()
    if llm.device_type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started, found


def generate_all(llm: LLM, requests: list[ReplayRequest], config: CollectConfig) -> list[list[int]]:
    """Steps per size and prompt, one generation after the other."""
    params = [config.params(request.seed) for request in requests]
    prompts = [request.prompt_ids for request in requests]
    found = [llm.generate(prompts, params, pilot=FixedPilot(size)) for size in config.sizes]
    return [[completion.num_steps for completion in completions] for completions in found]


def replay_all(llm: LLM, requests: list[ReplayRequest], config: CollectConfig) -> list[list[int]]:
    with tempfile.TemporaryDirectory() as folder:
        traces: TraceSet = collect(llm, requests, config, out=Path(folder), report=lambda *words: None)
        everything = list(traces)
    return [[len(walk_chain(trace, size)) for trace in everything] for size in config.sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--sizes", default="4,6,8,12,16,24")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(
        arguments.target,
        drafter=arguments.drafter,
        pilot="ar",
        config=EngineConfig(device=arguments.device, dtype=arguments.dtype, num_slots=arguments.slots),
    )
    prompts = read_prompts(arguments.prompts)[: arguments.num_prompts]
    requests = [ReplayRequest(p.id, "", llm.tokenizer.encode_chat(p.text), i) for i, p in enumerate(prompts)]
    sizes = tuple(map(int, arguments.sizes.split(",")))
    settings = {"sizes": sizes, "draft_sizes": (), "temperature": arguments.temperature, "shard_size": len(requests)}
    every = CollectConfig(**settings, max_new_tokens=arguments.max_new_tokens)
    visited = CollectConfig(**settings, max_new_tokens=arguments.max_new_tokens, anchors="visited")
    warm = CollectConfig(**settings, max_new_tokens=8)
    ways = {"generate each size": (generate_all, every), "every": (replay_all, every), "visited": (replay_all, visited)}
    seconds: dict[str, float] = {}
    steps: dict[str, object] = {}
    for name, (way, config) in ways.items():
        way(llm, requests[:1], warm)  # kernels are compiled and shapes prepared at first use
        seconds[name], steps[name] = timed(llm, lambda: way(llm, requests, config))  # noqa: B023  # called at once
        is_same = steps[name] == steps["generate each size"]
        print(json.dumps({"way": name, "seconds": round(seconds[name], 2), "same_steps": is_same}), flush=True)
    ratios = {name: round(seconds["generate each size"] / taken, 2) for name, taken in seconds.items()}
    print(json.dumps({"sizes": sizes, "num_prompts": len(requests), "faster_than_generating": ratios}))


if __name__ == "__main__":
    main()
