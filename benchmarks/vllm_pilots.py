r"""Pilots inside vLLM: drafted tokens, tokens per step and throughput, against fixed sizes and no speculation.

    blockpilot models export smollm2-135m --out target
    blockpilot profile --engine vllm --target target --drafter smollm2-135m-dflash \
      --engine-args '{"enforce_eager": true}'
    python benchmarks/vllm_pilots.py --target target --drafter smollm2-135m-dflash [--overhead]

Run it where vLLM is installed. Two engines stand side by side, one without speculation; every method answers the same
prompts, in turns and in a new order for every prompt. The best fixed size is chosen on calibration prompts, everything
is judged on test prompts. Seconds count prefill too. With `--overhead` the plugin's own share of a step is measured
instead, in one process. Prints a table and writes `vllm_pilots.json`.
"""

import argparse
import json
import os
import random
import time
from dataclasses import asdict, dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.bench.tasks import read_task
from blockpilot.models.export import public_drafter

NUM_DRAFT_TOKENS = 15
NONE = "no speculation"
FIXED = ("fixed:2", "fixed:3", "fixed:4", "fixed:6", "fixed:8", "fixed:12", "fixed:16")
COUNTERS = ("drafted_tokens", "accepted_tokens")


@dataclass
class Measured:
    """What one method did; one entry per group of prompts."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    num_steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_different: int = 0  # answers that are not those without speculation

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.accepted_tokens / max(self.num_steps, 1)


def make_engine(arguments: argparse.Namespace, *, is_speculative: bool) -> Any:
    from vllm import LLM

    options: dict[str, Any] = {}
    if is_speculative:
        drafter = public_drafter(arguments.drafter)
        options["speculative_config"] = {
            "method": "dflash", "model": drafter, "num_speculative_tokens": NUM_DRAFT_TOKENS
        }  # fmt: skip
        options["additional_config"] = {"blockpilot": arguments.pilot}
    return LLM(
        arguments.target,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=arguments.batch_size,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )


def answer(llm: Any, prompts: list[str], method: str, max_tokens: int) -> tuple[float, list[list[int]]]:
    from vllm import SamplingParams

    override = None if method == NONE else {"blockpilot": method}
    params = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=override)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    started = time.perf_counter()
    outputs = llm.chat(chats, params, use_tqdm=False)
    return time.perf_counter() - started, [list(output.outputs[0].token_ids) for output in outputs]


def read_counters(llm: Any) -> dict[str, int]:
    found = dict.fromkeys(("steps", *COUNTERS), 0)
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:blockpilot_")
        if name != metric.name and name in found:
            found[name] += int(metric.value)
    return found


def measure(
    engines: dict[bool, Any], groups: list[list[str]], methods: list[str], arguments: argparse.Namespace
) -> dict[str, Measured]:
    results = {method: Measured() for method in methods}
    shuffle = random.Random(0)
    for number, group in enumerate(groups):
        answers: dict[str, list[list[int]]] = {}
        for method in shuffle.sample(methods, len(methods)):
            llm, result = engines[method != NONE], results[method]
            before = read_counters(engines[True])
            seconds, answers[method] = answer(llm, group, method, arguments.max_new_tokens)
            after = read_counters(engines[True])
            result.tokens.append(sum(map(len, answers[method])))
            result.seconds.append(seconds)
            result.num_steps += after["steps"] - before["steps"]
            for name in COUNTERS:
                setattr(result, name, getattr(result, name) + after[name] - before[name])
        for method in methods:
            pairs = zip(answers[method], answers[NONE], strict=True)
            results[method].num_different += sum(ours != plain for ours, plain in pairs)
        print(f"{number + 1} of {len(groups)} groups", flush=True)
    return results


def ratio_interval(ours: Measured, other: Measured) -> list[float]:
    """95 % of the paired bootstrap of the throughput's ratio, over groups of prompts."""
    rows = np.random.default_rng(0).integers(len(ours.tokens), size=(5000, len(ours.tokens)))

    def rates(measured: Measured) -> Any:
        return np.array(measured.tokens)[rows].sum(axis=1) / np.array(measured.seconds)[rows].sum(axis=1)

    return np.quantile(rates(ours) / rates(other), (0.025, 0.975)).round(3).tolist()


def read_groups(arguments: argparse.Namespace, *, is_calibration: bool) -> list[list[str]]:
    prompts: list[str] = []
    for name in arguments.tasks.split(","):
        task = read_task(name, data=None, split="test")
        chosen = task.calibration if is_calibration else task.prompts
        count = arguments.calibration_prompts if is_calibration else arguments.num_prompts
        prompts += [prompt.text for prompt in chosen[:count]]
    random.Random(1).shuffle(prompts)
    return [prompts[start : start + arguments.batch_size] for start in range(0, len(prompts), arguments.batch_size)]


def print_table(results: dict[str, Measured], best: str) -> None:
    usual = results["fixed:16"]
    print("| method | tokens/s | tokens per step | drafted tokens | drafted against fixed 15 | different answers |")
    print("|---|---|---|---|---|---|")
    for method, found in results.items():
        share = found.drafted_tokens / max(usual.drafted_tokens, 1) - 1
        steps = "1.00" if method == NONE else f"{found.tokens_per_step:.2f}"
        name = f"{method}, best on calibration" if method == best else method
        print(
            f"| {name} | {found.tokens_per_second:.2f} | {steps} | {found.drafted_tokens} | {100 * share:+.1f} % | "
            f"{found.num_different} |"
        )


def run_comparison(arguments: argparse.Namespace) -> dict[str, Any]:
    engines = {False: make_engine(arguments, is_speculative=False), True: make_engine(arguments, is_speculative=True)}
    for is_speculative, llm in engines.items():
        answer(llm, ["Warm up."] * arguments.batch_size, "fixed:16" if is_speculative else NONE, 16)
    fixed = list(FIXED)
    calibration = measure(engines, read_groups(arguments, is_calibration=True), [NONE, *fixed], arguments)
    best = max(fixed, key=lambda method: calibration[method].tokens_per_second)
    methods = list(dict.fromkeys([NONE, "fixed:16", best, arguments.pilot]))
    results = measure(engines, read_groups(arguments, is_calibration=False), methods, arguments)
    print_table(results, best)
    pilot = results[arguments.pilot]
    intervals = {other: ratio_interval(pilot, results[other]) for other in methods if other != arguments.pilot}
    for other, interval in intervals.items():
        ratio = pilot.tokens_per_second / results[other].tokens_per_second
        print(f"{arguments.pilot} against {other}: {ratio:.3f} times the throughput, 95 % {interval}")
    return {
        "best_fixed": best,
        "calibration": {name: found.tokens_per_second for name, found in calibration.items()},
        "test": {name: asdict(found) for name, found in results.items()},
        "intervals": intervals,
    }


def run_overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds per step of everything that the plugin adds, in an engine inside this process."""
    from blockpilot.integrations.vllm import proposer

    llm = make_engine(arguments, is_speculative=True)
    piloted = llm.llm_engine.model_executor.driver_worker.worker.model_runner.propose_draft_token_ids.__self__
    spent = {"all": 0.0, "draft": 0.0, "scores": 0.0, "step": 0.0}

    def timed(name: str, function: Any) -> Any:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return run

    piloted.runner.propose_draft_token_ids = timed("all", piloted.propose)
    piloted._propose = timed("draft", piloted._propose)
    proposer.log_probs_of = timed("scores", proposer.log_probs_of)
    engine = llm.llm_engine
    engine.step = timed("step", engine.step)
    answer(llm, ["Warm up."], arguments.pilot, 16)
    spent.update(dict.fromkeys(spent, 0.0))
    before = read_counters(llm)
    for group in read_groups(arguments, is_calibration=False):
        answer(llm, group, arguments.pilot, arguments.max_new_tokens)
    num_steps = read_counters(llm)["steps"] - before["steps"]
    added = spent["all"] - spent["draft"] + spent["scores"]
    found = {
        "num_steps": num_steps,
        "added_ms_per_step": 1e3 * added / num_steps,
        "scores_ms_per_step": 1e3 * spent["scores"] / num_steps,
        "step_ms": 1e3 * spent["step"] / num_steps,
        "share": added / spent["step"],
    }
    print(json.dumps(found, indent=1))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="a Hugging Face folder")
    parser.add_argument("--drafter", default="smollm2-135m-dflash")
    parser.add_argument("--pilot", default="chain-step")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tasks", default="gsm8k,math500,humaneval,mt_bench")
    parser.add_argument("--num-prompts", type=int, default=5, help="test prompts per task")
    parser.add_argument("--calibration-prompts", type=int, default=2, help="per task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("."))
    arguments = parser.parse_args()
    if arguments.overhead:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    results = run_overhead(arguments) if arguments.overhead else run_comparison(arguments)
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = {"arguments": vars(arguments) | {"out": str(arguments.out)}, "results": results}
    (arguments.out / "vllm_pilots.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
