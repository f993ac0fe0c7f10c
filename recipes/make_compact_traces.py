"""Full traces in, traces to ship out: one compressed shard of at most 3 MB, a manifest and a notice.

    python recipes/make_compact_traces.py --traces DIR ... --out src/blockpilot/assets/smollm2-135m-traces

`blockpilot train-pilot --kind prefill` builds the BlockPilot paper's pilot from it. Folders are written by `blockpilot
collect`, all alike. Prompt sets whose licence is not known to allow shipping (`LICENCES`) are refused, and so are the
test prompts of evaluation sets: a shipped pilot must not have seen them. The traces hold no prompts: their ids, the
target's own answers as token ids, and what it knew after prefill.

What the drafter offered is left out; emitted lengths stay at every anchor. Of the first token's distribution the
likeliest tokens up to a mass are kept, in the order of their ids and rounded to bfloat16: both make them compress well.
"""

import argparse
import lzma
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from blockpilot.core.errors import InputError
from blockpilot.core.files import atomic_path, write_text
from blockpilot.core.manifests import MANIFEST, write_manifest
from blockpilot.replay.trace_files import TraceSet, pack_shard, require_alike, shard_path
from blockpilot.replay.traces import Trace

MASS, MAX_TOKENS, MAX_BYTES = 0.99, 512, 3_000_000
PRECISION = "float16"
SAME = (  # in all folders, and in the manifest
    "target",
    "drafter",
    "drafter_sha256",
    "dtype",
    "is_estimate",
    "sizes",
    "anchors",
    "temperature",
    "max_new_tokens",
    "context_length",
    "vocab_size",
    "trained_block_size",
    "max_block_size",
)
PER_SOURCE = (  # kept of each folder's manifest
    "prompt_files",
    "split",
    "num_prompts",
    "requests_sha256",
    "generation",
    "device",
    "package_version",
    "is_complete",
)
TRAINING = {  # prompt files and their licences
    "gsm8k_train": "MIT, openai/grade-school-math",
    "math_train": "MIT, MATH (Hendrycks et al.)",
    "mbpp_train": "CC-BY-4.0, google-research/google-research (MBPP)",
    "wsc": "CC-BY-4.0, Winograd Schema Collection (E. Davis)",
    "copa": "BSD-2-Clause, COPA (Roemmele, Gordon)",
    "oasst_subset": "Apache-2.0, Open Assistant",
    "ifeval": "Apache-2.0, google-research/google-research (IFEval)",
    "gpteacher_roleplay": "MIT, teknium1/GPTeacher",
}
EVALUATION = {  # their calibration prompts alone
    "gsm8k_test": "MIT, openai/grade-school-math",
    "math500": "MIT, MATH (Hendrycks et al.), split of openai/prm800k",
    "mbpp_sanitized_test": "CC-BY-4.0, google-research/google-research (MBPP)",
    "humaneval": "MIT, openai/human-eval",
    "mt_bench": "Apache-2.0, lm-sys/FastChat",
    "swebench_lite_test": "MIT, SWE-bench",
}
LICENCES = TRAINING | EVALUATION


def require_no_test_prompts(folders: Sequence[Path]) -> None:
    for folder in folders:
        manifest = TraceSet(folder).manifest
        names = {file["name"].split(".")[0] for file in manifest.get("prompt_files", ())}
        if names & set(EVALUATION) and manifest.get("split") != "calibration":
            raise InputError(f"{folder} holds test prompts: collect with --split calibration, or other prompts")


def write_compact(
    folders: Sequence[Path],
    out: Path,
    *,
    mass: float = MASS,
    max_tokens: int = MAX_TOKENS,
    max_bytes: int = MAX_BYTES,
    is_partial: bool = False,
) -> TraceSet:
    """The traces of folders that were collected alike, as one compressed shard.

    With `is_partial`, also those of folders whose collection was not finished.
    """
    if not 0 < mass <= 1 or max_tokens < 1:
        raise InputError(f"a mass of {mass} and {max_tokens} tokens: keep some, and at most all of them")
    sets = [TraceSet(folder) for folder in folders]
    require_alike(sets, SAME)
    if not is_partial and (unfinished := [found.folder for found in sets if not found.is_complete]):
        raise InputError(f"{unfinished[0]} is not complete: let `blockpilot collect` finish it first")
    traces = [cut(trace, mass, max_tokens) for found in sets for trace in found]
    if unknown := sorted({trace.task for trace in traces} - set(LICENCES)):
        raise InputError(f"the licence of the prompts of {unknown[0]!r} is not known to allow shipping: leave them out")
    data = lzma.compress(pack_shard(traces, PRECISION), preset=9 | lzma.PRESET_EXTREME)
    if len(data) > max_bytes:
        raise InputError(f"{len(data):,} bytes are more than {max_bytes:,}: keep less mass, or fewer requests")
    if (out / MANIFEST).exists():
        raise InputError(f"{out} holds traces already: choose another --out")
    with atomic_path(shard_path(out, 0, is_compressed=True)) as temporary:
        temporary.write_bytes(data)
    write_manifest(out, describe(sets, traces, {"kept_mass": mass, "max_kept_tokens": max_tokens}))
    return TraceSet(out)


def cut(trace: Trace, mass: float, max_tokens: int) -> Trace:
    """Without drafts, and with the likeliest first tokens alone."""
    prefill = trace.prefill
    best = np.argsort(-prefill.probabilities, kind="stable")
    count = int((np.cumsum(prefill.probabilities[best].astype(np.float64)) < mass).sum()) + 1
    places = best[: min(count, max_tokens)]
    places = places[np.argsort(prefill.token_ids[places])]
    bits = np.ascontiguousarray(prefill.probabilities[places], dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x8000) & 0xFFFF0000).astype(np.uint32).view(np.float32)  # nearest bfloat16; all are positive
    kept = replace(
        prefill,
        token_ids=prefill.token_ids[places],
        logits=None,
        probabilities=rounded,
        mass=float(rounded.sum(dtype=np.float64)),
    )
    return replace(trace, drafts={}, prefill=kept)


def describe(sets: Sequence[TraceSet], traces: Sequence[Trace], kept: dict[str, Any]) -> dict[str, Any]:
    tasks = dict(sorted(Counter(trace.task for trace in traces).items()))
    return {
        **{key: sets[0].manifest.get(key) for key in SAME},
        "draft_sizes": [],
        "num_candidates": 0,
        "precision": PRECISION,
        "is_compact": True,
        **kept,
        "num_traces": len(traces),
        "num_answer_tokens": sum(len(trace.answer_ids) for trace in traces),
        "num_disagreements": sum(trace.num_disagreements for trace in traces),
        "num_traces_by_task": tasks,
        "sources": [{key: found.manifest.get(key) for key in PER_SOURCE} for found in sets],
        "is_complete": all(found.is_complete for found in sets),
        "licences": {task: LICENCES[task] for task in tasks},
    }


def write_notice(traces: TraceSet) -> None:
    counts, licences = traces.manifest["num_traces_by_task"], traces.manifest["licences"]
    lines = [
        f"# Traces of {traces.manifest['target']} with {traces.manifest['drafter']}",
        "",
        "What every block size would have emitted in answers that the target wrote, and what it knew after prefill. "
        "`blockpilot train-pilot --kind prefill` builds the BlockPilot paper's pilot from it. Made by "
        "`recipes/make_compact_traces.py`. No prompt texts are inside; the prompts were of these sets:",
        "",
        "| set | requests | licence and source |",
        "|---|---|---|",
        *(f"| {task} | {count} | {licences[task]} |" for task, count in counts.items()),
    ]
    write_text(traces.folder / "NOTICE.md", "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, nargs="+", required=True, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    mass_help = "of the first token's distribution that is kept (default: %(default)s)"
    parser.add_argument("--mass", type=float, default=MASS, metavar="P", help=mass_help)
    tokens_help = "at most this many of them per request (default: %(default)s)"
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, metavar="N", help=tokens_help)
    bytes_help = "of the shard (default: %(default)s)"
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, metavar="N", help=bytes_help)
    parser.add_argument("--partial", action="store_true", help="take what an interrupted `collect` left, too")
    arguments = parser.parse_args()
    try:
        require_no_test_prompts(arguments.traces)
        found = write_compact(
            arguments.traces,
            arguments.out,
            mass=arguments.mass,
            max_tokens=arguments.max_tokens,
            max_bytes=arguments.max_bytes,
            is_partial=arguments.partial,
        )
    except InputError as error:
        sys.exit(f"make_compact_traces: {error}")
    write_notice(found)
    num_bytes = sum(path.stat().st_size for path in found.shards)
    count = found.manifest["num_traces"]
    print(f"{count:,} traces in {arguments.out}: {num_bytes:,} bytes, {num_bytes / count:,.0f} each")


if __name__ == "__main__":
    main()
