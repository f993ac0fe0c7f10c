"""What it costs to know the emitted lengths of several block sizes: replay against one generation per size.

    python benchmarks/replay.py [--prompts FILE] [--num-prompts 4] [--max-new-tokens 128]
    python benchmarks/replay.py --device cuda --num-prompts 64 --max-new-tokens 256

One engine, the same prompts, one run:

    generate, one by one    the paper's way: every prompt is decoded once per size, one request at a time
    generate, together      the same with as many requests in every step as replay answers together: the engine's best
    replay, every anchor    one answer per prompt, one pass over it, a draft of every size at every anchor
    replay, visited         the same, drafts only where a chain of each size stands: all that generating tells

A generation knows the anchors it visited; only the second replay is no better informed. Replay counts everything, from
writing the answers to files on the disk; generating counts prefill, once per size, as it must. Nothing else is kept of
either. Replay writes its answers as `blockpilot collect` does: on a GPU at temperature 0 in bulk (all prompts at once,
up to 256), else through the engine's slots; `--slots` sets these, by default to the number of prompts on a GPU and to 8
on a CPU. Warm-up is not counted; on a GPU it is a short run of all prompts, and of replay a whole one of as many as
share their passes.

Prints one JSON object per way, with the share of (prompt, size) pairs that took as many steps as when generated one by
one (in bfloat16 texts may differ), then one with replay's share of the time that generating took.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from blockpilot import LLM, EngineConfig
from blockpilot.bench.tasks import SHIPPED
from blockpilot.core.errors import BlockPilotError
from blockpilot.models.loading import load_target
from blockpilot.pilots.fixed import FixedPilot
from blockpilot.replay.collect import collect
from blockpilot.replay.collector import BULK_ROWS, TEXTS_PER_PASS
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.simulate import walk_chain
from blockpilot.text.prompts import read_prompts

WARM_TOKENS = 8
MIN_CONTEXT = 1024
GOAL = 1 / 3
ONE_BY_ONE, TOGETHER = "generate, one by one", "generate, together"
REPLAYS = {"every": "replay, every anchor", "visited": "replay, visited"}
Steps = list[list[int]]  # per size and prompt
Way = Callable[[LLM, list[ReplayRequest], int], Steps]  # with so many new tokens


def generate_each_size(
    llm: LLM, requests: list[ReplayRequest], max_new_tokens: int, *, settings: dict[str, Any], together: int
) -> Steps:
    """One generation after the other, `together` requests at a time."""
    config = CollectConfig(**settings, max_new_tokens=max_new_tokens)
    found: Steps = []
    for size in config.sizes:
        found.append([])
        for start in range(0, len(requests), together):
            share = requests[start : start + together]
            params = [config.params(request.seed) for request in share]
            prompts = [request.prompt_ids for request in share]
            found[-1] += [done.num_steps for done in llm.generate(prompts, params, pilot=FixedPilot(size))]
    return found


def replay(
    llm: LLM, requests: list[ReplayRequest], max_new_tokens: int, *, settings: dict[str, Any], anchors: str
) -> Steps:
    config = CollectConfig(**settings, max_new_tokens=max_new_tokens, anchors=anchors)
    with tempfile.TemporaryDirectory() as folder:
        traces = list(collect(llm, requests, config, out=Path(folder), report=lambda *words: None))
    return [[len(walk_chain(trace, size)) for trace in traces] for size in config.sizes]


def measure(
    llm: LLM, way: Way, requests: list[ReplayRequest], max_new_tokens: int, *, is_replay: bool
) -> tuple[float, Steps]:
    is_gpu = llm.device_type == "cuda"
    way(llm, requests if is_gpu else requests[:1], WARM_TOKENS)  # kernels are compiled and shapes prepared at first use
    if is_gpu and is_replay:  # some only for as many anchors as there will be
        way(llm, requests[: TEXTS_PER_PASS["cuda"]], max_new_tokens)
    if is_gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    steps = way(llm, requests, max_new_tokens)
    if is_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - started, steps


def share_of_same(steps: Steps, others: Steps) -> float:
    pairs = [pair for row in zip(steps, others, strict=True) for pair in zip(*row, strict=True)]
    return sum(ours == theirs for ours, theirs in pairs) / len(pairs)


def compare(arguments: argparse.Namespace) -> None:
    llm, requests = load(arguments)
    sizes = tuple(map(int, arguments.sizes.split(",")))
    settings = {"sizes": sizes, "draft_sizes": (), "temperature": arguments.temperature, "shard_size": len(requests)}
    together = min(llm.config.num_slots, len(requests))
    ways: dict[str, Way] = {
        ONE_BY_ONE: partial(generate_each_size, settings=settings, together=1),
        TOGETHER: partial(generate_each_size, settings=settings, together=together),
    }
    for anchors in arguments.anchors:
        ways[REPLAYS[anchors]] = partial(replay, settings=settings, anchors=anchors)
    llm.prepare(together)
    seconds: dict[str, float] = {}
    steps: dict[str, Steps] = {}
    for name, way in ways.items():
        print(f"{name} ({len(seconds)} of {len(ways)} done)", file=sys.stderr, flush=True)
        is_replay = name in REPLAYS.values()
        seconds[name], steps[name] = measure(llm, way, requests, arguments.max_new_tokens, is_replay=is_replay)
        same = share_of_same(steps[name], steps[ONE_BY_ONE])
        num_steps = sum(map(sum, steps[name]))
        row = {"way": name, "seconds": round(seconds[name], 3), "num_steps": num_steps, "same_steps": round(same, 3)}
        print(json.dumps(row), flush=True)
    shares = {
        name: {f"of {other}": round(seconds[name] / seconds[other], 3) for other in (ONE_BY_ONE, TOGETHER)}
        for name in ways
        if name.startswith("replay")
    }
    facts = {"sizes": sizes, "num_prompts": len(requests), "together": together, "goal": round(GOAL, 3)}
    print(json.dumps(facts | {"device": llm.device_type, "dtype": llm.config.dtype, "share_of_the_time": shares}))


def load(arguments: argparse.Namespace) -> tuple[LLM, list[ReplayRequest]]:
    is_gpu = arguments.device.startswith("cuda")
    dtype = arguments.dtype or ("bfloat16" if is_gpu else "float32")
    prompts = read_prompts(arguments.prompts)[: arguments.num_prompts]
    loaded = load_target(arguments.target, getattr(torch, dtype))
    encode = loaded.tokenizer.encode_chat
    requests = [ReplayRequest(prompt.id, "", encode(prompt.text), place) for place, prompt in enumerate(prompts)]
    longest = max(len(request.prompt_ids) for request in requests) + arguments.max_new_tokens
    config = EngineConfig(
        device=arguments.device,
        dtype=dtype,
        num_slots=arguments.slots or (min(len(requests), BULK_ROWS) if is_gpu else 8),
        context_length=min(max(MIN_CONTEXT, longest), loaded.decoder.config.context_length),
    )
    return LLM(loaded, drafter=arguments.drafter, pilot="ar", config=config), requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=SHIPPED / "gsm8k.jsonl.gz", help="default: GSM8K as it ships")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--sizes", default="4,6,8,12,16,24")
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--slots", type=int, default=None)
    parser.add_argument("--anchors", nargs="+", choices=tuple(REPLAYS), default=list(REPLAYS), help="replays to time")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    try:
        compare(arguments)
    except BlockPilotError as error:
        sys.exit(f"replay: {error}")


if __name__ == "__main__":
    main()
