"""`blockpilot collect`: replays prompts and writes traces.

What can be wrong with the command line and the prompt files is found before PyTorch is imported.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli.console import print_json, show_progress
from blockpilot.cli.ray_options import add_ray_arguments, check_ray, cluster_options
from blockpilot.cli.synthesize import ProgressLines
from blockpilot.core.config import EngineConfig, default_dtype, device_type
from blockpilot.core.errors import InputError
from blockpilot.text.prompts import read_prompts

if TYPE_CHECKING:
    from blockpilot.replay.collect import PlacedPrompt
    from blockpilot.replay.config import CollectConfig
    from blockpilot.replay.trace_files import TraceSet

DEFAULT_TARGET = "smollm2-135m"
NO_DFLASH = ("ngram", "none")
SHARD_SIZES = {"cpu": 16, "cuda": 64}
NUM_SLOTS = {"cpu": 8, "cuda": 32}
SPLITS = ("calibration", "test", "all")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        action="extend",
        nargs="+",
        required=True,
        type=Path,
        metavar="FILE",
        help="prompt files: .txt or .jsonl, also .gz and .xz",
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the traces; continues a run")
    parser.add_argument(
        "--num-prompts",
        type=int,
        default=0,
        metavar="N",
        help="the first N prompts of each file's split (default: all)",
    )
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="all",
        help="which prompts of each file, by the rule on their id (default: all)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    _add_model_arguments(parser.add_argument_group("model"))
    _add_record_arguments(parser.add_argument_group("record"))
    add_ray_arguments(parser.add_argument_group("several devices"))


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=f"default: {DEFAULT_TARGET}")
    drafter_help = "a DFlash drafter: folder, hub id or shipped name (default: auto, the one that ships for the target)"
    group.add_argument("--drafter", default="auto", metavar="MODEL", help=drafter_help)
    group.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    group.add_argument("--dtype", default=None, help="default: float32 on a CPU, bfloat16 on a GPU")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    seed_help = "each prompt's seed is this plus its place in its file (default: 0)"
    group.add_argument("--seed", type=int, default=0, metavar="N", help=seed_help)
    group.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default: 256")


def _add_record_arguments(group: argparse._ArgumentGroup) -> None:
    sizes_help = "block sizes whose emitted lengths are recorded (default: 2-20,24,32)"
    group.add_argument("--sizes", default="2-20,24,32", metavar="B,...", help=sizes_help)
    draft_help = "of these, those whose candidates are kept; none: '' (default: 4,8,16, or none with visited anchors)"
    group.add_argument("--draft-sizes", default=None, metavar="B,...", help=draft_help)
    group.add_argument("--candidates", type=int, default=8, metavar="K", help="kept per position (default: 8)")
    anchors_help = "visited: draft only where a fixed chain of each size stands; cheap sweeps (default: every)"
    group.add_argument("--anchors", default="every", metavar="WHICH", help=f"every or visited; {anchors_help}")
    group.add_argument(
        "--precision", default="float16", help="of stored numbers: float16 or float32 (default: float16)"
    )
    shard_help = "prompts per file; an interrupted run loses at most one file (default: 16 on a CPU, 64 on a GPU)"
    group.add_argument("--shard-size", type=int, default=None, metavar="N", help=shard_help)


def run(arguments: argparse.Namespace) -> int:
    check_ray(arguments)
    config, engine_config = _build_config(arguments), _build_engine_config(arguments)
    drafter = _choose_drafter(arguments.drafter, arguments.target)
    chosen = _choose_prompts(arguments)
    work = _collect_here if arguments.ray is None else _collect_on_ray
    traces = work(arguments, config, engine_config, drafter, chosen)
    _print_result(arguments, traces.manifest)
    return 0


def _collect_here(
    arguments: argparse.Namespace,
    config: "CollectConfig",
    engine_config: EngineConfig,
    drafter: str,
    chosen: "list[PlacedPrompt]",
) -> "TraceSet":
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.engine.llm import LLM
        from blockpilot.replay.collect import collect, encode_requests
        from blockpilot.replay.collector import require_dflash

        llm = LLM(arguments.target, drafter=drafter, pilot="ar", config=engine_config, progress=progress)
    require_dflash(llm)
    requests = encode_requests(llm, chosen, config.seed)
    source = _describe_source(arguments, drafter)
    return collect(llm, requests, config, out=arguments.out, report=ProgressLines(), source=source)


def _collect_on_ray(
    arguments: argparse.Namespace,
    config: "CollectConfig",
    engine_config: EngineConfig,
    drafter: str,
    chosen: "list[PlacedPrompt]",
) -> "TraceSet":
    from blockpilot.integrations.ray.collect import CollectJob, collect_on_ray

    job = CollectJob(
        target=arguments.target,
        drafter=drafter,
        engine=engine_config,
        prompts=chosen,
        config=config,
        source=_describe_source(arguments, drafter),
    )
    return collect_on_ray(job, cluster_options(arguments), out=arguments.out, report=ProgressLines())


def _print_result(arguments: argparse.Namespace, manifest: dict[str, Any]) -> None:
    keys = ("num_traces", "num_shards", "num_answer_tokens", "num_disagreements", "is_estimate")
    found = {key: manifest[key] for key in keys}
    if arguments.json:
        print_json({"out": str(arguments.out), **found})
        return
    kind = "estimated traces" if found["is_estimate"] else "traces"
    print(f"{found['num_traces']:,} {kind} with {found['num_answer_tokens']:,} answer tokens in {arguments.out}")


def _build_config(arguments: argparse.Namespace) -> "CollectConfig":
    from blockpilot.replay.config import DEFAULT_DRAFT_SIZES, CollectConfig

    sizes = _parse_sizes(arguments.sizes, "--sizes")
    if arguments.draft_sizes is not None:
        draft_sizes = _parse_sizes(arguments.draft_sizes, "--draft-sizes")
    elif arguments.anchors == "visited":
        draft_sizes = ()
    else:
        draft_sizes = tuple(size for size in DEFAULT_DRAFT_SIZES if size in sizes)
    return CollectConfig(
        sizes=sizes,
        draft_sizes=draft_sizes,
        num_candidates=arguments.candidates,
        temperature=arguments.temperature,
        seed=arguments.seed,
        max_new_tokens=arguments.max_new_tokens,
        anchors=arguments.anchors,
        precision=arguments.precision,
        shard_size=SHARD_SIZES[device_type(arguments.device)] if arguments.shard_size is None else arguments.shard_size,
    )


def _build_engine_config(arguments: argparse.Namespace) -> EngineConfig:
    dtype = arguments.dtype or default_dtype(arguments.device)
    return EngineConfig(device=arguments.device, dtype=dtype, num_slots=NUM_SLOTS[device_type(arguments.device)])


def _parse_sizes(text: str, name: str) -> tuple[int, ...]:
    """`2-6,8` -> 2, 3, 4, 5, 6, 8."""
    sizes: set[int] = set()
    for part in text.split(",") if text else ():
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()) or (dash and int(last) < int(first)):
            raise InputError(f"{name} {text!r}: give block sizes and ranges separated by commas, such as 2-8,16")
        sizes.update(range(int(first), int(last if dash else first) + 1))
    return tuple(sorted(sizes))


def _choose_drafter(spec: str, target: str) -> str:
    from blockpilot.models.shipped import shipped_drafter

    if spec in NO_DFLASH:
        raise InputError(f"replay needs a DFlash drafter, got {spec}: give --drafter a DFlash folder or hub id")
    if spec != "auto":
        return spec
    if (shipped := shipped_drafter(target)) is None:
        raise InputError(f"replay needs a DFlash drafter, and none ships for {target}: give --drafter")
    return shipped


def _choose_prompts(arguments: argparse.Namespace) -> "list[PlacedPrompt]":
    """Task, place in the file, and prompt."""
    if arguments.num_prompts < 0:
        raise InputError(f"--num-prompts must be at least 0 (all), got {arguments.num_prompts}")
    chosen = []
    for path in arguments.prompts:
        task = path.name.split(".")[0]
        found = [
            (task, place, prompt)
            for place, prompt in enumerate(read_prompts(path))
            if arguments.split == "all" or prompt.is_calibration == (arguments.split == "calibration")
        ]
        if not found:
            raise InputError(f"prompt file {path} has no {arguments.split} prompts")
        chosen += found[: arguments.num_prompts or None]
    return chosen


def _describe_source(arguments: argparse.Namespace, drafter: str) -> dict[str, Any]:
    from blockpilot.core.files import hash_file
    from blockpilot.models.loading import resolve_folder
    from blockpilot.replay.collect import hash_weights

    return {
        "drafter_sha256": hash_weights(resolve_folder(drafter, what="drafter")),
        "prompt_files": [{"name": path.name, "sha256": hash_file(path)} for path in arguments.prompts],
        "split": arguments.split,
        "num_prompts": arguments.num_prompts or None,
    }
