"""Tokens per second of pilots on one pair, interleaved prompt by prompt so that drift hits all alike.

    python benchmarks/pair_speed.py --data DIR --split calibration --pilots ar,fixed:4,tree:3,tree:7
    python benchmarks/pair_speed.py --data DIR --split test --pilots ar,auto

`--data` is a folder of prompt sets (`gsm8k_test.jsonl.gz`, `math500.jsonl.gz`, `humaneval.jsonl.gz`,
`mt_bench.jsonl.gz`); without it three built-in prompts run. Choose on calibration prompts, report on test prompts.
Speed is decode tokens over decode seconds, every draft included, prefill excluded. Every answer is compared with plain
decoding. Speedups carry a paired bootstrap interval over prompts.
"""

import argparse
import json
import random
from pathlib import Path

import torch

from blockpilot import LLM, Completion, EngineConfig, SamplingParams
from blockpilot.text.prompts import read_prompts

TASKS = ("gsm8k_test", "math500", "humaneval", "mt_bench")
BUILT_IN = (
    "Explain in three sentences why the sky is blue.",
    "Write a function to check whether a number is prime.",
    "A baker sells 48 rolls in the morning and half as many in the afternoon. How many in all? Think step by step.",
)


def choose_prompts(data: Path | None, split: str, count: int) -> list[str]:
    if data is None:
        return list(BUILT_IN)
    wanted = split == "calibration"
    sets = [read_prompts(data / f"{task}.jsonl.gz") for task in TASKS]
    return [p.text for prompts in sets for p in [q for q in prompts if q.is_calibration == wanted][:count]]


def measure(llm: LLM, prompts: list[str], pilots: list[str], params: SamplingParams) -> dict[str, list[Completion]]:
    """Completions per pilot, in prompt order; the order of pilots is shuffled anew for every prompt."""
    found: dict[str, list[Completion]] = {pilot: [] for pilot in pilots}
    for pilot in pilots:  # warm up: kernels are compiled and shapes prepared at first use
        llm.generate(prompts[0], SamplingParams(max_new_tokens=12), pilot=pilot)
    shuffle = random.Random(0)
    for prompt in prompts:
        for pilot in shuffle.sample(pilots, len(pilots)):
            found[pilot].append(llm.generate(prompt, params, pilot=pilot))
    return found


def speed(completions: list[Completion]) -> float:
    tokens = sum(step.emitted for c in completions for step in c.steps)
    return tokens / sum(c.decode_seconds for c in completions)


def interval(ours: list[Completion], plain: list[Completion], rounds: int = 2000) -> list[float]:
    draw = random.Random(1)
    ratios = []
    for _ in range(rounds):
        rows = draw.choices(range(len(ours)), k=len(ours))
        ratios.append(speed([ours[i] for i in rows]) / speed([plain[i] for i in rows]))
    ratios.sort()
    return [round(ratios[int(0.025 * rounds)], 3), round(ratios[int(0.975 * rounds)], 3)]


def describe(pilot: str, found: dict[str, list[Completion]]) -> dict[str, object]:
    ours, plain = found[pilot], found["ar"]
    steps = [step for c in ours for step in c.steps]
    per_step = {
        name: round(1e3 * sum(getattr(step, f"{name}_seconds") for step in steps) / len(steps), 2)
        for name in ("draft", "verify", "pilot")
    }
    return {
        "pilot": pilot,
        "tokens_per_second": round(speed(ours), 2),
        "speedup": round(speed(ours) / speed(plain), 3),
        "speedup_ci": interval(ours, plain),
        "tau_pooled": round(sum(step.emitted for step in steps) / len(steps), 3),
        "milliseconds_per_step": per_step,
        "mismatches": sum(a.token_ids != b.token_ids for a, b in zip(ours, plain, strict=True)),
        "num_prompts": len(ours),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--split", choices=("calibration", "test"), default="calibration")
    parser.add_argument("--pilots", default="ar,auto", help="comma-separated; ar is always measured")
    parser.add_argument("--num-prompts", type=int, default=2, help="per task (default: 2)")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--linear-backend", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    llm = LLM(config=EngineConfig(num_slots=1, linear_backend=arguments.linear_backend))
    pilots = list(dict.fromkeys(["ar", *arguments.pilots.split(",")]))
    params = SamplingParams(max_new_tokens=arguments.max_new_tokens, temperature=arguments.temperature)
    prompts = choose_prompts(arguments.data, arguments.split, arguments.num_prompts)
    found = measure(llm, prompts, pilots, params)
    for pilot in pilots:
        print(json.dumps(describe(pilot, found)), flush=True)


if __name__ == "__main__":
    main()
