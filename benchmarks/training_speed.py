"""Throughput and memory of synthesis and drafter training on the shapes of real targets, with random weights.

    python benchmarks/training_speed.py --shape qwen3-4b --device cuda

One JSON row per kind of work: tokens per second, steps per second, peak memory. Speed does not depend on what the
weights are, so this tells what a run would cost on a machine without the model. Every answer has the full length, which
makes synthesis look a little slower than it is.
"""

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from blockpilot.core.config import MAX_BLOCK_SIZE
from blockpilot.models.config import DecoderConfig, RopeConfig
from blockpilot.models.decoder import Decoder
from blockpilot.models.dflash import DFlash, DFlashConfig
from blockpilot.models.eagle3 import Eagle3, Eagle3Config
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.distributed import join_group
from blockpilot.training.drafter_run import DrafterRun
from blockpilot.training.drafters import initialise, spread_taps
from blockpilot.training.objectives import DFlashTraining, DrafterTraining, Eagle3Training
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.trainer import Trainer

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden": 64, "ffn": 128, "layers": 6, "heads": 4, "kv": 2, "dim": 16, "vocab": 512, "tied": True},
    "smollm2-135m": {"hidden": 576, "ffn": 1536, "layers": 30, "heads": 9, "kv": 3, "dim": 64, "vocab": 49152},
    "qwen3-4b": {"hidden": 2560, "ffn": 9728, "layers": 36, "heads": 32, "kv": 8, "dim": 128, "vocab": 151936},
    "qwen3-8b": {"hidden": 4096, "ffn": 12288, "layers": 36, "heads": 32, "kv": 8, "dim": 128, "vocab": 151936},
}


def make_config(name: str) -> DecoderConfig:
    shape = SHAPES[name]
    return DecoderConfig(
        architecture="llama" if name == "smollm2-135m" else "qwen3",
        vocab_size=shape["vocab"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["ffn"],
        num_layers=shape["layers"],
        num_heads=shape["heads"],
        num_kv_heads=shape["kv"],
        head_dim=shape["dim"],
        norm_eps=1e-6,
        context_length=8192,
        rope=RopeConfig(theta=1e6),
        is_tied=name != "qwen3-8b",
    )


def make_decoder(config: DecoderConfig, device: str) -> Decoder:
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
        decoder = Decoder(config)
        torch.set_default_dtype(torch.float32)
    return decoder.eval().requires_grad_(False)


def time_synthesis(decoder: Decoder, *, num_rows: int, length: int, num_texts: int) -> dict[str, Any]:
    generator = BulkGenerator(decoder, num_rows=num_rows, capacity=length + 1, eos_token_ids=(), seed=0)
    draw = random.Random(0)
    vocab = decoder.config.vocab_size
    texts = [Row([draw.randrange(vocab) for _ in range(64)], 0.0, draw.randint(96, length)) for _ in range(num_texts)]
    for _ in generator.run(iter(Row(row.prompt_ids, 0.0, 96) for row in texts[:8])):
        pass  # compiles and captures
    started = time.perf_counter()
    num_tokens = sum(len(row.answer_ids) for row in generator.run(iter(texts)))
    seconds = time.perf_counter() - started
    return {"rows": num_rows, "seconds": round(seconds, 2), "tokens_per_second": round(num_tokens / seconds)}


def make_texts(vocab_size: int, *, count: int, width: int, seed: int) -> ResponseSet:
    draw = random.Random(seed)
    return ResponseSet.from_responses(
        Response([draw.randrange(vocab_size) for _ in range(draw.randint(width // 2, width))], 64) for _ in range(count)
    )


def make_objective(run: DrafterRun, decoder: Decoder, arguments: argparse.Namespace) -> DrafterTraining:
    from dataclasses import replace

    kind, config, device = run.kind, decoder.config, arguments.device
    if kind == "eagle3":
        rows = min(arguments.head_size or 32000, config.vocab_size)
        shapes = replace(config, architecture="llama", num_layers=1)
        head = Eagle3(
            Eagle3Config(
                layers=shapes,
                draft_vocab_size=rows,
                tap_layers=(1, config.num_layers // 2 - 1, config.num_layers - 4),
                num_target_layers=config.num_layers,
                target_hidden_size=config.hidden_size,
            )
        )
        head.draft_token_ids = torch.arange(rows)
        return Eagle3Training(head.to(device), decoder, run)
    layers = arguments.layers or 5
    model = DFlash(
        DFlashConfig(
            layers=replace(
                config,
                architecture="qwen3",
                num_layers=layers,
                intermediate_size=arguments.intermediate_size or config.intermediate_size,
            ),
            block_size=min(16, MAX_BLOCK_SIZE),
            mask_token_id=config.vocab_size - 1,
            tap_layers=spread_taps(config.num_layers, 5),
            num_target_layers=config.num_layers,
            conv_kernel_size=2 if kind == "dflash2" else 0,
            selector_rank=arguments.selector_rank if kind == "dflash2" else 0,
        )
    )
    initialise(model)
    if arguments.head_size:
        model.draft_token_ids = torch.arange(arguments.head_size)
    return DFlashTraining(model.to(device), decoder, run)


def time_training(kind: str, decoder: Decoder, arguments: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(arguments.device)
    texts = make_texts(decoder.config.vocab_size, count=256, width=arguments.width, seed=1)
    run = DrafterRun(
        kind=kind,
        steps=10_000_000,
        batch_size=arguments.batch_size,
        blocks=arguments.blocks,
        width=arguments.width,
        optimizer="muon" if device.type == "cuda" else "adamw",
        checkpoint_every=10**9,
        is_compiled=device.type == "cuda",
    )
    objective = make_objective(run, decoder, arguments)
    with tempfile.TemporaryDirectory() as folder, join_group(device) as group:
        trainer = Trainer(objective, texts, run, out=Path(folder), group=group, identity={})
        for _ in range(3):
            trainer._train_step()["loss"].item()
        started = time.perf_counter()
        for _ in range(arguments.steps):
            metrics = trainer._train_step()
        metrics["loss"].item()
        seconds = (time.perf_counter() - started) / arguments.steps
        if arguments.profile:
            print_profile(trainer)
    num_tokens = float(texts.lengths.float().mean()) * arguments.batch_size
    return {
        "step_ms": round(1000 * seconds, 1),
        "steps_per_second": round(1 / seconds, 2),
        "tokens_per_second": round(num_tokens / seconds),
        "blocks_per_second": round(arguments.batch_size * arguments.blocks / seconds),
        "parameters": sum(parameter.numel() for parameter in objective.model.parameters()),
    }


def print_profile(trainer: Trainer) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            trainer._train_step()["loss"].item()
    print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", default="synthesis,dflash,dflash2,eagle3")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--width", type=int, default=448)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--intermediate-size", type=int, default=0)
    parser.add_argument("--head-size", type=int, default=0)
    parser.add_argument("--selector-rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    decoder = make_decoder(make_config(arguments.shape), arguments.device)
    for work in arguments.work.split(","):
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if work == "synthesis":
            row = time_synthesis(decoder, num_rows=arguments.rows, length=arguments.width, num_texts=arguments.texts)
        else:
            row = time_training(work, decoder, arguments)
        peak = torch.cuda.max_memory_allocated() / 2**30 if arguments.device == "cuda" else 0.0
        facts = {"shape": arguments.shape, "work": work, "batch_size": arguments.batch_size, "blocks": arguments.blocks}
        print(json.dumps(facts | row | {"peak_gib": round(peak, 1)}), flush=True)


if __name__ == "__main__":
    main()
