"""Do simulated and measured throughput agree? The same prompts, machine and step costs, in one run.

    python benchmarks/simulated_speed.py [--tasks gsm8k,humaneval] [--num-prompts 4] [--max-new-tokens 128] [--out DIR]
    python benchmarks/simulated_speed.py --device cuda --num-prompts 64 --max-new-tokens 256

    costs       drafts and checks are timed as by `blockpilot profile`; pilots weigh this table, online and simulated
    measure     every method decodes every prompt, in an order shuffled anew for each prompt; warm-up is not counted
    replay      the same prompts become traces: answered once, drafted at every anchor
    simulate    each method's pilot walks through the traces; a step costs what the table says

One request at a time, the first turn of every prompt. Tokens per second are those of decoding alone, as in `bench`.
Traces keep all that pilots ask for and never leave memory, so in float32 simulated steps should be the measured ones.
In bfloat16 replay is an estimate: answers and drafts may differ, and `same answer` and `same steps` say how often. On a
CPU `step` and `auto` check copies, too, which replay does not know: what is simulated of them is the drafter's part.

`ratio` is simulated over measured tokens per second, which is the ratio of tokens per step over that of step times: see
`tau` and `step ms`. Brackets are 95 % of a paired bootstrap over prompts. The table's `verify` includes growing and
walking a tree, which online is partly `pilot`; what else the host does in a step (`other`: keeping, showing the drafter
what was kept, making text) the table knows only as one `overhead`, without the text. Nothing is corrected for that.
Costs are timed once more after decoding: where they have moved, the machine has, and ratios move with it. The ratio of
speedups (over `ar`, both sides) suffers less from that.

Prints the mean over tasks; `--out` gets `rows.jsonl` (per task and their mean), `answers.jsonl`, `profile.json` and
`manifest.json`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
from simulated_rows import Walk, build_rows, show

from blockpilot import EngineConfig
from blockpilot.bench import manifest as manifests
from blockpilot.bench.answers import Answer
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.measuring import Asker, Measurer
from blockpilot.bench.methods import NO_DRAFTER, Method, choose_drafters, parse_methods
from blockpilot.bench.plan import Fit, encode_turn, fit_prompts, plan_rounds
from blockpilot.bench.tasks import TaskPrompts, default_tasks, read_task
from blockpilot.cli.console import show_counted
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.core.progress import Progress
from blockpilot.engine.llm import LLM
from blockpilot.engine.profile import measure
from blockpilot.engine.step_timing import ProfilePlan
from blockpilot.models.loading import load_target
from blockpilot.pilots.base import Pilot
from blockpilot.pilots.fixed import FixedPilot, TreePilot
from blockpilot.pilots.prefill import PrefillPilot
from blockpilot.pilots.registry import load_pilot
from blockpilot.pilots.step import StepPilot
from blockpilot.replay.collector import Collector
from blockpilot.replay.config import CollectConfig, ReplayRequest
from blockpilot.replay.simulate import simulate
from blockpilot.text.prompts import SPLITS

METHODS = "ar,dflash:4,dflash:8,dflash:16,tree:15,tree:63,chain-step,auto"


def compare(arguments: argparse.Namespace, out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: choose another --out")
    methods = choose_methods(arguments)
    tasks = read_tasks(arguments)
    config = BenchConfig(
        tasks=tuple(task.name for task in tasks),
        methods=tuple(method.name for method in methods),
        num_prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        repeats=arguments.repeats,
        split=arguments.split,
    )
    drafter = choose_drafters(methods, arguments.target, {"dflash": arguments.drafter}).get("dflash")
    if drafter is None:
        raise InputError("no method drafts: name another one beside ar")
    plan = plan_profile(arguments)
    llm, fit = load_engine(arguments, config, tasks, drafter, plan)
    description = manifests.describe_run(config, methods, fit.tasks, llm, {"dflash": drafter})
    manifest = manifests.open_run(out, description)
    write_text(out / "profile.json", json.dumps(llm.costs.to_dict(), indent=1) + "\n")
    answers = decode_all(llm, fit, config, methods, out)
    drift = measure_drift(llm, plan)
    walks = simulate_all(llm, fit, config, methods)
    rows = build_rows(answers, walks, config, llm.costs)
    write_text(out / "rows.jsonl", "".join(json.dumps({**row, "manifest": manifest["id"]}) + "\n" for row in rows))
    manifests.write(out, manifest | {"is_complete": True, "drift": drift})
    show(rows)
    print("costs after decoding over those before: " + ", ".join(f"{name} {x:.3f}" for name, x in drift.items()))


def choose_methods(arguments: argparse.Namespace) -> tuple[Method, ...]:
    names = [name.strip() for name in arguments.methods.split(",")]
    methods = parse_methods(names, device=arguments.device, target=arguments.target)
    for method in methods:
        if method.drafter not in (NO_DRAFTER, "dflash") or not method.pilot:
            raise InputError(f"method {method.name!r} cannot be simulated: replay knows one pilot and a DFlash drafter")
    return methods


def read_tasks(arguments: argparse.Namespace) -> list[TaskPrompts]:
    """First turns only: replay answers one turn."""
    given = arguments.tasks
    names = default_tasks(arguments.data) if given is None else [name.strip() for name in given.split(",")]
    tasks = [read_task(name, data=arguments.data, split=arguments.split) for name in dict.fromkeys(names)]
    return [task.first_turns() for task in tasks]


def plan_profile(arguments: argparse.Namespace) -> ProfilePlan:
    contexts = tuple(map(int, arguments.contexts.split(",")))
    if arguments.quick_profile:
        return ProfilePlan.quick(contexts=contexts, is_gpu=arguments.device.startswith("cuda"))
    return ProfilePlan.full((1,), contexts, is_gpu=arguments.device.startswith("cuda"))


def load_engine(
    arguments: argparse.Namespace,
    config: BenchConfig,
    tasks: Sequence[TaskPrompts],
    drafter: str,
    plan: ProfilePlan,
) -> tuple[LLM, Fit]:
    """An engine whose pilots weigh step costs measured just now, and the prompts that fit."""
    dtype = arguments.dtype or ("bfloat16" if arguments.device.startswith("cuda") else "float32")
    loaded = load_target(arguments.target, getattr(torch, dtype))
    fit = fit_prompts(tasks, loaded.tokenizer, config, loaded.decoder.config.context_length)
    settings = EngineConfig(
        device=arguments.device,
        dtype=dtype,
        num_slots=1,
        token_budget=fit.token_budget(1),
        context_length=fit.context_length,
    )
    first = LLM(loaded, drafter=drafter, pilot="ar", config=settings)
    first.prepare()
    print("measuring step costs", file=sys.stderr, flush=True)
    costs = measure(first, plan)
    return LLM(loaded, drafter=first.drafter, pilot="ar", config=settings, costs=costs), fit


def measure_drift(llm: LLM, plan: ProfilePlan) -> dict[str, float]:
    """How much longer drafts and checks take now than when costs were measured; the median over their sizes."""
    print("measuring step costs again", file=sys.stderr, flush=True)
    before, after = llm.costs, measure(llm, plan)
    return {
        name: float(np.median([new.ms / old.ms for old, new in zip(*points, strict=True)]))
        for name, points in {"draft": (before.draft, after.draft), "verify": (before.verify, after.verify)}.items()
    }


def decode_all(llm: LLM, fit: Fit, config: BenchConfig, methods: Sequence[Method], out: Path) -> Sequence[Answer]:
    rounds = plan_rounds({task.name: task.prompts for task in fit.tasks}, config.concurrency, config.repeats)
    asker = Asker({NO_DRAFTER: llm, "dflash": llm}, config)
    longest = max(rounds, key=lambda work: len(encode_turn(llm.tokenizer, work.prompts[0], [])))
    with show_counted("answers") as report:
        progress = Progress(report, len(rounds) * len(methods))
        for method in methods:  # what occurs late in an answer is prepared too
            asker.warm_up([method], [longest], progress)
            asker.ask(longest, method)
        measurer = Measurer(asker.answer_rounds, progress)
        answers = measurer.measure(rounds, methods, out / "answers.jsonl")
    if measurer.left_out:
        raise BlockPilotError("; ".join(f"task {task}: {reason}" for task, reason in measurer.left_out.items()))
    return answers


def simulate_all(
    llm: LLM, fit: Fit, config: BenchConfig, methods: Sequence[Method]
) -> dict[tuple[str, str], list[Walk]]:
    """Replay every prompt and let every method's pilot walk through it."""
    assert llm.drafter is not None
    pilots = {method.name: load_same_pilot(llm, method) for method in methods}
    requests = [
        ReplayRequest(prompt.id, task.name, encode_turn(llm.tokenizer, prompt, []), config.seed + place)
        for task in fit.tasks
        for place, prompt in enumerate(task.prompts)
    ]
    sizes = needed_sizes(list(pilots.values()), llm.drafter.block_size)
    collecting = CollectConfig(
        sizes=sizes,
        draft_sizes=sizes,
        num_candidates=max(1, *(pilot.num_candidates for pilot in pilots.values())),
        temperature=config.temperature,
        seed=config.seed,
        max_new_tokens=config.max_new_tokens,
    )
    collector = Collector(llm, requests, collecting)
    is_pipelined = llm.engine.device_executor is not None  # there choices come one step late
    walks: dict[tuple[str, str], list[Walk]] = {(task, name): [] for task in config.tasks for name in pilots}
    with show_counted("replayed") as report:
        progress = Progress(report, len(requests))
        for shard in range(-(-len(requests) // collecting.shard_size)):
            for trace in collector.trace(shard):
                for name, pilot in pilots.items():
                    walks[trace.task, name].append(
                        Walk(trace.answer_ids.tolist(), simulate(trace, pilot, llm.costs, is_pipelined=is_pipelined))
                    )
                progress.advance("traces")
    return walks


def load_same_pilot(llm: LLM, method: Method) -> Pilot:
    """What `LLM.generate` makes of the method's pilot."""
    assert llm.drafter is not None
    return load_pilot(
        method.pilot,
        target=llm.target_name,
        drafter=llm.drafter.name,
        max_block_size=llm.drafter.max_block_size,
        costs=lambda: llm.costs,
    )


def needed_sizes(pilots: Sequence[Pilot], trained: int) -> tuple[int, ...]:
    """Every block size that one of the pilots may ask for."""
    sizes = {trained}
    for pilot in pilots:
        if isinstance(pilot, FixedPilot):
            sizes.add(pilot.block_size)
        elif isinstance(pilot, TreePilot):
            sizes.add(pilot.draft_size or trained)
        elif isinstance(pilot, StepPilot):
            sizes.update(pilot.draft_sizes)
        elif isinstance(pilot, PrefillPilot):
            sizes.update(pilot.network.config.sizes)
    return tuple(sorted(size for size in sizes if size > 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="whole prompt sets, as for bench")
    parser.add_argument("--tasks", metavar="NAME,...", help="default: all that are at hand")
    parser.add_argument("--num-prompts", type=int, default=4, metavar="N", help="per task, 0: all (default: 4)")
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="times are pooled (default: 1)")
    parser.add_argument("--split", choices=SPLITS, default="test")
    parser.add_argument("--methods", default=METHODS, metavar="NAME,...", help=f"default: {METHODS}")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--drafter", default="auto", metavar="MODEL", help="a DFlash drafter (default: auto)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    contexts_help = "lengths at which checks are timed; two or more tell what context costs (default: 256)"
    parser.add_argument("--contexts", default="256", metavar="N,...", help=contexts_help)
    quick_help = "the rougher table that pilots measure by themselves where nobody ran `blockpilot profile`"
    parser.add_argument("--quick-profile", action="store_true", help=quick_help)
    parser.add_argument("--out", type=Path, metavar="DIR", help="a new folder (default: one under runs/)")
    arguments = parser.parse_args()
    out = arguments.out or Path("runs") / f"simulated-speed-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        compare(arguments, out)
    except BlockPilotError as error:
        sys.exit(f"simulated_speed: {error}")
    print(f"rows are in {out}", file=sys.stderr)


if __name__ == "__main__":
    main()
