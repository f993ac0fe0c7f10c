"""Where the time of a recorded pass goes: microseconds of every kernel, from the end of the one before it to its own.

    python benchmarks/gpu_kernels.py --shapes qwen3-4b --passes 1x1,1x64t,16x16,16x16t

A pass is requests x tokens, with `t` for a branching tree. Kernels overlap on Hopper and later, so durations add up to
more than the pass takes; the time between two ends does not. Products are told apart by the kernel that follows them.
Weights are random: speed does not depend on them.
"""

import argparse
import json
import random
from collections import defaultdict
from statistics import median

import torch
from gpu_shapes import DEVICE, make_config, make_decoder, read_shapes
from torch.profiler import ProfilerActivity, profile

from blockpilot.core.device import Placement
from blockpilot.core.tree import DraftTree
from blockpilot.gpu.device import wait_for
from blockpilot.gpu.target import GpuTargetRunner

CONTEXT, NAME_LENGTH = 512, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="qwen3-4b,smollm2-135m")
    parser.add_argument("--passes", default="1x1,1x16t,1x64t,16x1,16x16,16x16t,64x8")
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    shapes = read_shapes(parser, arguments.shapes)
    dtype = getattr(torch, arguments.dtype)
    for shape in shapes:
        decoder = make_decoder(make_config(shape), dtype)
        for text in arguments.passes.split(","):
            num_requests, count = (int(part) for part in text.rstrip("t").split("x"))
            placement = Placement(num_slots=num_requests, context_length=CONTEXT + 256, device=DEVICE, dtype=dtype)
            runner = GpuTargetRunner(decoder, placement)
            runner.cache.rows.normal_()
            kernels = time_kernels(runner, num_requests, count, can_branch=text.endswith("t"))
            total = round(sum(one["sum_us"] for one in kernels.values()), 1)
            print(json.dumps({"shape": shape, "pass": text, "us": total, "kernels": kernels}), flush=True)
            del runner


def time_kernels(
    runner: GpuTargetRunner, num_requests: int, count: int, *, can_branch: bool
) -> dict[str, dict[str, float]]:
    slots = [runner.cache.reserve() for _ in range(num_requests)]
    for slot in slots:
        runner.cache.lengths[slot] = CONTEXT
    trees = [(slot, make_tree(slot, count, can_branch=can_branch)) for slot in slots]
    runner.verify(trees, ())
    run = runner.find_pass(slots, count, (), can_branch=can_branch).run
    for _ in range(5):
        run()
    wait_for(runner.device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run()
        wait_for(runner.device)
    is_kernel = torch.autograd.DeviceType.CUDA
    events = [event for event in found.events() if event.device_type == is_kernel]
    events.sort(key=lambda event: event.time_range.end)
    times: dict[str, list[float]] = defaultdict(list)
    last = events[0].time_range.start
    for event, behind in zip(events, [*events[1:], None], strict=True):
        name = event.name[:NAME_LENGTH]
        if name.startswith("_linear") and behind is not None:
            name += " before " + behind.name[:NAME_LENGTH]
        times[name].append(event.time_range.end - last)
        last = event.time_range.end
    order = sorted(times, key=lambda name: -sum(times[name]))
    return {
        name: {
            "number": len(times[name]),
            "median_us": round(median(times[name]), 2),
            "sum_us": round(sum(times[name]), 1),
        }
        for name in order
    }


def make_tree(slot: int, count: int, *, can_branch: bool) -> DraftTree:
    ids = list(range(2 + slot, 1 + slot + count))
    if not can_branch:
        return DraftTree.chain(1 + slot, ids)
    generator = random.Random(0)
    return DraftTree.build(1 + slot, [(generator.randrange(max(0, i - 3), i + 1), id) for i, id in enumerate(ids)])


if __name__ == "__main__":
    main()
