"""Held-out tau of drafters, per task and block size, from one greedy generation per prompt.

    python benchmarks/drafter_tau.py --data DIR --drafter DIR [--drafter DIR ...] --device cuda

`--data` is a folder of prompt sets (`gsm8k_test.jsonl.gz`, ...). The first `--num-prompts` test prompts of each task
are answered greedily (with `--split calibration` calibration prompts, sha256(id) divisible by 4: choose on these), then
every drafter is evaluated at every anchor of those answers. In float32 the result equals online decoding; in bfloat16
it is an estimate.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from blockpilot.models.loading import LoadedTarget, load_drafter
from blockpilot.text.prompts import read_prompts
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.evaluation import TauReport, evaluate_drafter
from blockpilot.training.responses import Response, ResponseSet
from blockpilot.training.setup import load_training_target

TASKS = {
    "gsm8k": "gsm8k_test.jsonl.gz",
    "math500": "math500.jsonl.gz",
    "humaneval": "humaneval.jsonl.gz",
    "mt_bench": "mt_bench.jsonl.gz",
    "mbpp": "mbpp_sanitized_test.jsonl.gz",
}
HEADLINE = ("gsm8k", "math500", "humaneval", "mt_bench")


def answer(
    target: LoadedTarget, path: Path, *, num_prompts: int, max_new_tokens: int, is_calibration: bool
) -> ResponseSet:
    """Greedy answers to the first prompts of a task's split."""
    prompts = [prompt for prompt in read_prompts(path) if prompt.is_calibration == is_calibration][:num_prompts]
    encoded = [target.tokenizer.encode_chat(prompt.text) for prompt in prompts]
    capacity = max(map(len, encoded)) + max_new_tokens
    generator = BulkGenerator(
        target.decoder,
        num_rows=min(num_prompts, 64),
        capacity=capacity + 1,
        eos_token_ids=target.tokenizer.eos_token_ids,
        seed=0,
    )
    rows = generator.run(Row(ids, 0.0, len(ids) + max_new_tokens) for ids in encoded)
    return ResponseSet.from_responses(Response(row.prompt_ids + row.answer_ids, len(row.prompt_ids)) for row in rows)


def evaluate(target: LoadedTarget, folder: str, texts: ResponseSet, block_size: int) -> TauReport:
    weight = target.decoder.embed_tokens.weight
    model = load_drafter(folder, weight.dtype, num_target_layers=target.decoder.config.num_layers)
    width = int(texts.lengths.max())
    return evaluate_drafter(
        model.to(weight.device), target.decoder, texts, block_size=block_size, width=width, batch_size=8
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--block-sizes", default="16")
    parser.add_argument("--split", choices=("test", "calibration"), default="test")
    arguments = parser.parse_args()
    target = load_training_target(arguments.target, device=arguments.device, dtype=arguments.dtype)
    limits = {
        "num_prompts": arguments.num_prompts,
        "max_new_tokens": arguments.max_new_tokens,
        "is_calibration": arguments.split == "calibration",
    }
    answers = {task: answer(target, arguments.data / name, **limits) for task, name in TASKS.items()}
    dtype = target.decoder.embed_tokens.weight.dtype
    for folder in arguments.drafter:
        for size in map(int, arguments.block_sizes.split(",")):
            means = []
            for task, texts in answers.items():
                report = evaluate(target, folder, texts, size)
                row = {
                    "drafter": folder,
                    "task": task,
                    "block_size": size,
                    "num_prompts": len(texts),
                    "dtype": str(dtype),
                }
                print(json.dumps(row | vars(report)), flush=True)
                means += [report.tau_loop_free] if task in HEADLINE else []
            print(
                f"{folder} B={size}: mean tau_loop_free {sum(means) / len(means):.3f} "
                f"of {[round(m, 2) for m in means]}",
                file=sys.stderr,
            )


if __name__ == "__main__":
    with torch.inference_mode():
        main()
