"""Step times on a GPU against the memory floor: what the hardware must take to read the weights and the cache.

    python benchmarks/gpu_step.py --shapes qwen3-4b --out rows.jsonl
    python benchmarks/gpu_step.py --shapes qwen3-4b --peers eager,compiled

One JSON row for each pass: shape x batch x tokens x context. `ms` is what a caller waits for (writing the plan, the
graph, reading the result), `graph_ms` the device's part; `floor_ms` is bytes over the copy rate measured in the same
run, and `matrix_share` the multiplications per second over those of one large product in the same run. Rows of work
`step` time whole steps of a method, from the end of one to that of the next: pilot, draft, check, acceptance, keeping;
rows of work `prompt` the reading of a prompt.
Weights are random: speed does not depend on them, but for experts. Every token of a check is another one, and the floor
has the experts that they chose. What does not fit in memory, or in a recorded pass, is skipped and said.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_shapes import (
    DEVICE,
    DRAFT_LAYERS,
    SHAPES,
    flops,
    idle_bytes,
    make_config,
    make_decoder,
    make_drafter,
    make_engine,
    read_shapes,
    weight_bytes,
)

from blockpilot.bench.manifest import git_commit
from blockpilot.core.errors import InputError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.core.tree import DraftTree
from blockpilot.decoding.drafter import DraftRequest
from blockpilot.decoding.probe import ProbeSizes, probe
from blockpilot.engine.sequence import Sequence
from blockpilot.engine.speculative_step import NO_CHOICES, DecodeLoop
from blockpilot.gpu.buckets import MAX_DRAFT_ROWS
from blockpilot.gpu.dflash import GpuDFlashDrafter
from blockpilot.gpu.first_difference import find_difference
from blockpilot.gpu.step import DeviceExecutor
from blockpilot.gpu.target import GpuTargetRunner
from blockpilot.models.config import DecoderConfig
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash
from blockpilot.pilots.registry import load_pilot

PROBED_SLOTS = 16


class Rates(NamedTuple):
    """Of this device, measured in this run."""

    copy: float  # bytes per second
    matrix: float  # floating point operations per second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--batches", default="1,4,16,64")
    parser.add_argument("--tokens", default="1,4,8,16,32,64,128")
    parser.add_argument("--contexts", default="512,4096,16384")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--steps", default="fixed:16,tree:63", help="pilots whose whole steps are timed")
    parser.add_argument("--prompts", default="", help="lengths of prompts whose reading is timed, one request")
    parser.add_argument("--probe", action="store_true", help="compare logits bit for bit, as `blockpilot probe` does")
    parser.add_argument("--peers", default="", help="of eager,compiled: transformers on the same shape")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    arguments = parser.parse_args()
    shapes = read_shapes(parser, arguments.shapes)
    dtype = getattr(torch, arguments.dtype)
    rates = Rates(copy_rate(), matrix_rate(dtype))
    facts = {
        "device": torch.cuda.get_device_name(),
        "dtype": arguments.dtype,
        "copy_tb_per_s": round(rates.copy / 1e12, 3),
        "matrix_tflop_per_s": round(rates.matrix / 1e12),
        "git_commit": git_commit(),
    }
    print(f"rates: {facts}", file=sys.stderr)
    for shape in shapes:
        for row in measure(shape, arguments, dtype, rates):
            text = json.dumps({"shape": shape, **row, **facts})
            print(text, flush=True)
            if arguments.out:
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(text + "\n")


def copy_rate() -> float:
    """Bytes per second of an elementwise copy, read and written."""
    source = torch.ones(2**28, device=DEVICE)
    target = torch.empty_like(source)
    seconds = device_ms(lambda: torch.mul(source, 1.5, out=target), 15) / 1e3
    return 2 * source.nbytes / seconds


def matrix_rate(dtype: torch.dtype, size: int = 8192) -> float:
    """Multiplications and additions per second of one large product."""
    left, right = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    return 2 * size**3 / (device_ms(lambda: left @ right, 15) / 1e3)


def measure(shape: str, arguments: argparse.Namespace, dtype: torch.dtype, rates: Rates) -> Iterator[dict[str, Any]]:
    config = make_config(shape)
    decoder = make_decoder(config, dtype)
    drafter_model = make_drafter(config, dtype)
    tokens = [int(text) for text in arguments.tokens.split(",")]
    for batch in map(int, arguments.batches.split(",")):
        for context in map(int, arguments.contexts.split(",")):
            place = {"batch": batch, "context": context}
            gc.collect()  # graphs and their owners refer to each other
            torch.cuda.empty_cache()
            try:
                runner, drafter = make_engine(decoder, drafter_model, batch, context, dtype)
            except (torch.OutOfMemoryError, InputError) as error:  # ours is raised before anything is allocated
                print(f"skipped {shape} {place}: {error}", file=sys.stderr)
                continue
            slots = [runner.cache.reserve() for _ in range(batch)]
            for slot in slots:
                runner.cache.lengths[slot] = drafter.cache.lengths[slot] = context
            weights = weight_bytes(decoder, with_embedding=config.is_tied)
            kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize
            for count in tokens:
                if not runner.can_run(batch, count):
                    skip(f"{shape} {place}: checks of {count} tokens", batch * count, runner.max_rows)
                    continue
                first = [1 + index * count for index in range(batch)]
                trees = [
                    (slot, DraftTree.chain(id, list(range(id + 1, id + count))))
                    for slot, id in zip(slots, first, strict=True)
                ]
                read = weights - idle_bytes(runner, trees)
                floor = (read + batch * (context + count) * kv) / rates.copy * 1e3
                row = time_both(partial(runner.verify, trees, ()), arguments.repeats)
                share = flops(decoder, batch * count) / (row["ms"] / 1e3) / rates.matrix
                row["matrix_share"] = round(share, 4)
                yield {"work": "verify", **place, "tokens": count, **row, **against(floor, row)}
                for slot in slots:
                    runner.cache.lengths[slot] = context
            draft_weights = weight_bytes(drafter_model) + decoder.lm_head.weight.nbytes
            draft_kv = kv * DRAFT_LAYERS // config.num_layers
            for size in (4, 8, 16, 32):
                if batch * size > MAX_DRAFT_ROWS:
                    skip(f"{shape} {place}: drafts of {size}", batch * size, MAX_DRAFT_ROWS)
                    continue
                requests = [
                    DraftRequest(
                        slot=slot,
                        anchor_id=1,
                        position=context,
                        block_size=size,
                        num_candidates=1,
                        params=SamplingParams(),
                    )
                    for slot in slots
                ]
                floor = (draft_weights + batch * (context + size) * draft_kv) / rates.copy * 1e3
                row = time_both(partial(drafter.propose, requests), arguments.repeats)
                yield {"work": "draft", **place, "tokens": size, **row, **against(floor, row)}
                for slot in slots:
                    drafter.cache.lengths[slot] = context
            for pilot in filter(None, arguments.steps.split(",")):
                row = time_steps(pilot, runner, drafter, slots, context, arguments.repeats)
                yield {"work": "step", **place, "pilot": pilot, **row}
            del runner, drafter
    for length in map(int, filter(None, arguments.prompts.split(","))):
        gc.collect()
        torch.cuda.empty_cache()
        row = time_prompt(decoder, drafter_model, length, dtype, arguments.repeats)
        share = flops(decoder, length) / (row["ms"] / 1e3) / rates.matrix
        yield {"work": "prompt", "batch": 1, "context": 0, "tokens": length, **row, "matrix_share": round(share, 4)}
    if arguments.probe:
        gc.collect()
        torch.cuda.empty_cache()
        yield {"work": "probe", "batch": PROBED_SLOTS, **probe_shape(decoder, drafter_model, dtype)}
    del drafter_model
    for peer in filter(None, arguments.peers.split(",")):
        yield from time_peer(peer, config, decoder, tokens, rates.copy, arguments.repeats)


def skip(what: str, num_rows: int, most: int) -> None:
    print(f"skipped {what}: {num_rows} rows, and recorded passes hold {most}", file=sys.stderr)


def time_steps(
    pilot: str, runner: GpuTargetRunner, drafter: GpuDFlashDrafter, slots: list[int], context: int, repeats: int
) -> dict[str, Any]:
    """Whole steps of one method, one request for each slot. Random drafts are refused: a step emits one token."""
    params, chosen = SamplingParams(max_new_tokens=128), load_pilot(pilot)
    for slot in slots:
        runner.cache.lengths[slot] = drafter.cache.lengths[slot] = context
    sequences = [
        Sequence(
            request_id=slot,
            prompt_ids=[1] * context,
            params=params,
            pilot=chosen,
            eos_token_ids=frozenset(),
            max_total=context + 128,
            detokenizer=Silent(),  # type: ignore[arg-type]
            slot=slot,
            num_prefilled=context,
            output_ids=[1 + slot],
        )
        for slot in slots
    ]
    loop = DecodeLoop([DeviceExecutor(runner, drafter)], drafter, runner.buckets)
    step, landings = None, []
    for _ in range(repeats + 4):
        step = step or loop.begin(sequences, NO_CHOICES, time.perf_counter())
        behind, _ = loop.follow(step)
        landings.append(loop.land(step)[1])
        step = behind
    torch.cuda.synchronize()
    walls = [1e3 * (after - before) for before, after in pairwise(landings[3:])]
    last = sequences[0].steps[-1]
    return {"ms": round(statistics.median(walls), 4), "tokens": last.verify_size, "emitted": last.emitted}


def time_prompt(decoder: Decoder, model: DFlash, length: int, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Reading a whole prompt into an empty slot, without a drafter."""
    runner, _ = make_engine(decoder, model, 1, length, dtype)
    slot, ids = runner.cache.reserve(), [index % 1000 for index in range(length)]

    def read() -> None:
        runner.cache.lengths[slot] = 0
        runner.prefill([(slot, ids)], ())

    return time_both(read, repeats)


def probe_shape(decoder: Decoder, model: DFlash, dtype: torch.dtype) -> dict[str, Any]:
    runner, _ = make_engine(decoder, model, PROBED_SLOTS, ProbeSizes().text, dtype)
    return probe(runner, find_difference).to_dict()


class Silent:
    """A detokenizer for tokens that mean nothing."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def against(floor: float, row: dict[str, float]) -> dict[str, float]:
    return {"floor_ms": round(floor, 4), "ratio": round(row["ms"] / floor, 3)}


def time_both(run: Callable[[], object], repeats: int) -> dict[str, float]:
    """Medians: what a caller waits for, with nothing else on the way, and between two marks on the device."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    walls, devices = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        walls.append(1e3 * (time.perf_counter() - started))
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        devices.append(begin.elapsed_time(end))
    return {"ms": round(statistics.median(walls), 4), "graph_ms": round(statistics.median(devices), 4)}


def device_ms(run: Callable[[], object], repeats: int) -> float:
    return time_both(run, repeats)["graph_ms"]


def time_peer(
    peer: str, config: DecoderConfig, decoder: Decoder, tokens: list[int], rate: float, repeats: int
) -> Iterator[dict[str, Any]]:
    """One forward pass of `transformers` behind 512 tokens, batch 1, eager or with a static cache and compiled."""
    from transformers import DynamicCache, Qwen3Config, Qwen3ForCausalLM, StaticCache

    given = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(given).to(torch.bfloat16).eval()
    floor = weight_bytes(decoder, with_embedding=config.is_tied) / rate * 1e3
    is_compiled = peer == "compiled"
    forward = torch.compile(model.forward, mode="reduce-overhead", dynamic=False) if is_compiled else model.forward
    for count in tokens if not is_compiled else [1, 16]:
        cache = StaticCache(config=given, max_cache_len=1024) if is_compiled else DynamicCache(config=given)
        with torch.inference_mode():
            model(torch.ones(1, 512, dtype=torch.long, device=DEVICE), past_key_values=cache, use_cache=True)
            ids = torch.ones(1, count, dtype=torch.long, device=DEVICE)

            def run(ids=ids, cache=cache) -> None:  # type: ignore[no-untyped-def]
                forward(ids, past_key_values=cache, use_cache=True)
                if not is_compiled:
                    cache.crop(512)
                elif cache.get_seq_length() + ids.shape[1] > 1024:  # its length is a tensor, and grows
                    for layer in cache.layers:
                        layer.cumulative_length.fill_(512)

            row = time_both(run, repeats)
        yield {
            "work": f"transformers {peer}",
            "batch": 1,
            "context": 512,
            "tokens": count,
            **row,
            **against(floor, row),
        }


if __name__ == "__main__":
    main()
