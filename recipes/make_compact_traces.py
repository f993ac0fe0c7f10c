"""Full traces in, traces to ship out: one compressed shard of at most 3 MB, a manifest and a notice.

    python recipes/make_compact_traces.py --traces DIR ... --out src/blockpilot/assets/smollm2-135m-traces

`blockpilot train-pilot --kind prefill` builds the BlockPilot paper's pilot from it. Folders are written by `blockpilot
collect`, all alike. Prompt sets whose licence is not known to allow shipping (`LICENCES`) are refused, and so are the
test prompts of evaluation sets: a shipped pilot must not have seen them. The traces hold no prompts: their ids, the
target's own answers as token ids, and what it knew after prefill.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from blockpilot.core.errors import InputError
from blockpilot.core.files import write_text
from blockpilot.replay.compact import Kept, write_compact
from blockpilot.replay.trace_files import TraceSet

MAX_BYTES = 3_000_000
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
    parser.add_argument("--mass", type=float, default=Kept.mass, metavar="P", help=mass_help)
    tokens_help = "at most this many of them per request (default: %(default)s)"
    parser.add_argument("--max-tokens", type=int, default=Kept.max_tokens, metavar="N", help=tokens_help)
    bytes_help = "of the shard (default: %(default)s)"
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, metavar="N", help=bytes_help)
    parser.add_argument("--partial", action="store_true", help="take what an interrupted `collect` left, too")
    arguments = parser.parse_args()
    try:
        require_no_test_prompts(arguments.traces)
        kept = Kept(arguments.mass, arguments.max_tokens)
        found = write_compact(
            arguments.traces,
            arguments.out,
            kept=kept,
            max_bytes=arguments.max_bytes,
            licences=LICENCES,
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
