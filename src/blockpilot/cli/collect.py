"""`blockpilot collect`: replays prompts and writes traces.

What can be wrong with the command line and the prompt files is found before PyTorch is imported.
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot.cli import options
from blockpilot.cli.console import ProgressLines, print_result, show_progress
from blockpilot.core.config import device_type
from blockpilot.core.errors import InputError, require_at_least
from blockpilot.core.files import hash_file
from blockpilot.core.locks import command_name, hold_folder
from blockpilot.text.prompts import SPLITS, read_prompts

if TYPE_CHECKING:
    from blockpilot.replay.config import CollectConfig, CollectJob, PlacedPrompt
    from blockpilot.replay.trace_files import TraceSet

_SHARD_SIZES = {"cpu": 16, "cuda": 64}
_NUM_SLOTS = {"cpu": 8, "cuda": 32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    prompts_help = "prompt files: .txt or .jsonl, also .gz and .xz"
    add("--prompts", action="extend", nargs="+", required=True, type=Path, metavar="FILE", help=prompts_help)
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the traces; continues a run")
    count_help = "the first N prompts of each file's split (default: all)"
    add("--num-prompts", type=int, default=0, metavar="N", help=count_help)
    options.add_option(parser, "--split", "all", "which prompts of each file, by the rule on their id", choices=SPLITS)
    add("--json", action="store_true", help="print one JSON object at the end")
    group = parser.add_argument_group("model")
    options.add_target_options(group, "a DFlash drafter: folder, hub id or shipped name")
    options.add_option(group, "--temperature", 0.0, "0 is greedy", metavar="T")
    options.add_option(group, "--seed", 0, "each prompt's seed is this plus its place in its file")
    options.add_option(group, "--max-new-tokens", 256)
    _add_record_options(parser.add_argument_group("record"))
    options.add_ray_options(parser.add_argument_group("several devices"))


def _add_record_options(group: options.Options) -> None:
    sizes_help = "block sizes whose emitted lengths are recorded"
    options.add_option(group, "--sizes", "2-20,24,32", sizes_help, metavar="B,...")
    draft_help = "of these, those whose candidates are kept; none: '' (default: 4,8,16, or none with visited anchors)"
    group.add_argument("--draft-sizes", metavar="B,...", help=draft_help)
    options.add_option(group, "--candidates", 8, "kept per position", metavar="K")
    anchors_help = "every, or visited: draft only where a fixed chain of each size stands; cheap sweeps"
    options.add_option(group, "--anchors", "every", anchors_help, metavar="WHICH")
    options.add_option(group, "--precision", "float16", "of stored numbers: float16 or float32", metavar="PRECISION")
    logits_help = "keep all logits of the first token, 2 bytes for each token of the vocabulary: the paper's pilot "
    group.add_argument("--whole-logits", action="store_true", help=logits_help + "is trained on them")
    shard_help = "prompts per file; an interrupted run loses at most one file (default: 16 on a CPU, 64 on a GPU)"
    group.add_argument("--shard-size", type=int, metavar="N", help=shard_help)


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.replay.config import CollectJob

    options.check_ray(arguments)
    job = CollectJob(
        config=_build_config(arguments),
        engine=options.read_engine_config(arguments, num_slots=_NUM_SLOTS[device_type(arguments.device)]),
        target=arguments.target,
        drafter=_choose_drafter(arguments),
        prompts=_choose_prompts(arguments),
        source=_describe_source(arguments),
    )
    with hold_folder(arguments.out, command_name()):
        manifest = _collect(job, arguments).manifest
    keys = ("num_traces", "num_shards", "num_answer_tokens", "num_disagreements", "is_estimate")
    found = {key: manifest[key] for key in keys}
    kind = "estimated traces" if found["is_estimate"] else "traces"
    line = f"{found['num_traces']:,} {kind} with {found['num_answer_tokens']:,} answer tokens in {arguments.out}"
    print_result({"out": str(arguments.out), **found}, line, is_json=arguments.json)
    return 0


def _collect(job: "CollectJob", arguments: argparse.Namespace) -> "TraceSet":
    report = ProgressLines()
    if arguments.ray is not None:
        from blockpilot.integrations.ray.collect import collect_on_ray

        return collect_on_ray(job, options.cluster_options(arguments), out=arguments.out, report=report)
    with show_progress(f"loading {job.target}") as progress:
        from blockpilot.engine.llm import LLM
        from blockpilot.replay.collect import collect, encode_requests
        from blockpilot.replay.collector import require_dflash

        llm = LLM(job.target, drafter=job.drafter, pilot="ar", config=job.engine, progress=progress)
    require_dflash(llm)
    requests = encode_requests(llm, job.prompts, job.config.seed)
    return collect(llm, requests, job.config, out=arguments.out, report=report, source=job.source)


def _build_config(arguments: argparse.Namespace) -> "CollectConfig":
    from blockpilot.replay.config import DEFAULT_DRAFT_SIZES, CollectConfig

    sizes = options.read_sizes(arguments.sizes, "--sizes")
    if arguments.draft_sizes is not None:
        draft_sizes = options.read_sizes(arguments.draft_sizes, "--draft-sizes")
    elif arguments.anchors == "visited":
        draft_sizes = ()
    else:
        draft_sizes = tuple(size for size in DEFAULT_DRAFT_SIZES if size in sizes)
    given = {"sizes": sizes, "draft_sizes": draft_sizes, "num_candidates": arguments.candidates}
    if arguments.shard_size is None:
        given["shard_size"] = _SHARD_SIZES[device_type(arguments.device)]
    return CollectConfig(**options.read_fields(CollectConfig, arguments) | given)


def _choose_drafter(arguments: argparse.Namespace) -> str:
    from blockpilot.models.shipped import shipped_drafter

    spec, target = arguments.drafter, arguments.target
    if spec in ("ngram", "none"):
        raise InputError(f"replay needs a DFlash drafter, got {spec}: give --drafter a DFlash folder or hub id")
    if spec != "auto":
        return str(spec)
    if (shipped := shipped_drafter(target)) is None:
        raise InputError(f"replay needs a DFlash drafter, and none ships for {target}: give --drafter")
    return shipped


def _choose_prompts(arguments: argparse.Namespace) -> "list[PlacedPrompt]":
    """Task, place in the file, and prompt."""
    require_at_least(arguments, num_prompts=0)
    chosen = []
    for path in arguments.prompts:
        task = path.name.split(".")[0]
        prompts = read_prompts(path)
        found = [(task, place, prompt) for place, prompt in enumerate(prompts) if prompt.is_in(arguments.split)]
        if not found:
            raise InputError(f"prompt file {path} has no {arguments.split} prompts")
        chosen += found[: arguments.num_prompts or None]
    return chosen


def _describe_source(arguments: argparse.Namespace) -> dict[str, Any]:
    from blockpilot.models.loading import resolve_folder
    from blockpilot.replay.collect import hash_weights

    return {
        "drafter_sha256": hash_weights(resolve_folder(_choose_drafter(arguments))),
        "prompt_files": [{"name": path.name, "sha256": hash_file(path)} for path in arguments.prompts],
        "split": arguments.split,
        "num_prompts": arguments.num_prompts or None,
    }
