"""Held-out tau of drafters, per task and block size, from one greedy generation per prompt.

    python benchmarks/drafter_tau.py --data DIR --drafter DIR [--drafter DIR ...] --device cuda
    python benchmarks/drafter_tau.py --prompts poem.jsonl sql.jsonl ... --drafter DIR --device cuda

`--data` is a folder of prompt sets (`gsm8k_test.jsonl.gz`, ...). The first `--num-prompts` test prompts of each task
are answered greedily (with `--split calibration` calibration prompts, sha256(id) divisible by 4: choose on these), then
every drafter is evaluated at every anchor of those answers. `--prompts` takes files as they are: all their prompts. In
float32 the result equals online decoding; in bfloat16 it is an estimate.

`--contexts 512,1024,2048,4096` asks each question behind others of its file, as many as fit into so many tokens: tau
by the length of the context. Answers to the same questions differ between contexts.
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
HEADLINE = ("gsm8k", "math500", "humaneval", "mt_bench")  # the mean is of these, where they are asked


def read_tasks(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """Prompts by task; other prompts of the same file stand behind those that are asked, for longer contexts."""
    found = {path.name.split(".")[0]: [one.text for one in read_prompts(path)] for path in arguments.prompts}
    if arguments.data is not None:
        is_calibration = arguments.split == "calibration"
        for task, name in TASKS.items():
            prompts = read_prompts(arguments.data / name)
            found[task] = [prompt.text for prompt in prompts if prompt.is_calibration == is_calibration]
    return found


def put_behind_others(target: LoadedTarget, prompts: list[str], count: int, context: int) -> list[list[int]]:
    """The first prompts, each behind as many of the others as `context` tokens allow; without a context, alone."""
    found = []
    for place, prompt in enumerate(prompts[:count]):
        text, ids = prompt, target.tokenizer.encode_chat(prompt)
        for step in range(1, len(prompts) if context else 1):
            longer = f"{prompts[(place + step) % len(prompts)]}\n\n{text}"
            more = target.tokenizer.encode_chat(longer)
            if len(more) > context:
                break
            text, ids = longer, more
        found.append(ids)
    return found


def answer(target: LoadedTarget, encoded: list[list[int]], max_new_tokens: int) -> ResponseSet:
    """Greedy answers."""
    generator = BulkGenerator(
        target.decoder,
        num_rows=min(len(encoded), 64),
        capacity=max(map(len, encoded)) + max_new_tokens + 1,
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
    parser.add_argument("--data", type=Path)
    parser.add_argument("--prompts", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--drafter", action="append", required=True)
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default=None)
    parser.add_argument("--num-prompts", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--block-sizes", default="16")
    parser.add_argument("--contexts", default="0", metavar="N,N,...", help="0: the prompt alone")
    parser.add_argument("--split", choices=("test", "calibration"), default="test")
    arguments = parser.parse_args()
    if arguments.data is None and not arguments.prompts:
        parser.error("no prompts: give --data DIR or --prompts FILE")
    target = load_training_target(arguments.target, device=arguments.device, dtype=arguments.dtype)
    tasks = read_tasks(arguments)
    for context in map(int, arguments.contexts.split(",")):
        encoded = {
            task: put_behind_others(target, prompts, arguments.num_prompts, context) for task, prompts in tasks.items()
        }
        answers = {task: answer(target, ids, arguments.max_new_tokens) for task, ids in encoded.items()}
        for folder in arguments.drafter:
            for size in map(int, arguments.block_sizes.split(",")):
                show(target, folder, answers, size, context)


def show(target: LoadedTarget, folder: str, answers: dict[str, ResponseSet], size: int, context: int) -> None:
    means = {}
    for task, texts in answers.items():
        report = vars(evaluate(target, folder, texts, size))
        report.pop("tau_by_source")
        means[task] = report["tau_loop_free"]
        row = {
            "drafter": folder,
            "task": task,
            "block_size": size,
            "context": context,
            "mean_prompt": round(float(texts.prompt_lengths.float().mean()), 1),
            "num_prompts": len(texts),
            "dtype": str(target.decoder.embed_tokens.weight.dtype),
        }
        print(json.dumps(row | report), flush=True)
    counted = [means[task] for task in HEADLINE if task in means] or list(means.values())
    mean = sum(counted) / len(counted)
    each = ", ".join(f"{task} {tau:.2f}" for task, tau in means.items())
    print(f"{folder} B={size} context {context}: mean tau_loop_free {mean:.3f} ({each})", file=sys.stderr)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
