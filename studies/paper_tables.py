"""The BlockPilot paper's experiments for any target and drafter: its pilot, its Table 2, its figures 3a to 3c, Table 1.

    python studies/paper_tables.py --target MODEL --drafter MODEL --pilot-prompts FILE ... --out DIR [--device cuda]
                                   [--data DIR] [--eagle3 MODEL] [--minutes 25] [--score-code]

Trains the paper's pilot for each temperature on the prompts given (the paper: ShareGPT, WSC and COPA), measures
EAGLE-3, DFlash at 4, 8, 16 and 32 and the pilot on seven tasks beside `best-fixed`, `best-fixed-tree` and `auto`, and
replays every block size from 8 to 24 on more prompts. `report.md` has the paper's layout, its numbers beside ours, and
for each of its claims what was found. All work is done by `collect`, `train-pilot`, `bench`, `report` and
`pilot_experiments.py` (`paper_study/plan.py` lists the stages); stages meet in `--out`.

With `--minutes N` the running stage is stopped after N minutes and keeps what it has; the same command goes on. Exit
code 0: everything is there; 3: time was up. `--report` writes the report of what is there and measures nothing.
`--drafter-data DIR`, a folder of `blockpilot synthesize`, lets the report say whether drafter and pilot were trained on
the same prompts: give the pilot's files to `synthesize --exclude`. `--quick` trains a narrow network for a few steps: a
check that everything runs, no result.
"""

import argparse
import logging
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from paper_study.evidence import read_evidence
from paper_study.figure import draw_figures
from paper_study.pages import list_runs, write_report
from paper_study.plan import PAPER_TASKS, StudyConfig, prepare
from paper_study.running import run_stages

from blockpilot.bench.tasks import NOT_SHIPPED
from blockpilot.cli.options import DEFAULT_TARGET, read_list
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.core.locks import hold_folder
from blockpilot.core.reading import read_json
from blockpilot.models.shipped import shipped_drafter
from blockpilot.report.build import build_report

TIME_IS_UP = 3

logger = logging.getLogger("paper_tables")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="folder of the study; continues one")
    add("--target", default=DEFAULT_TARGET, metavar="MODEL")
    add("--drafter", default="auto", metavar="MODEL", help="a DFlash drafter (default: the one that ships)")
    add(
        "--eagle3",
        default="auto",
        metavar="MODEL",
        help="EAGLE-3 drafter (default: the one that ships; none: left out)",
    )
    add("--device", default="cpu")
    add("--dtype")
    add("--data", metavar="DIR", help="folder with the whole prompt sets (default: the subsets inside the package)")
    add("--tasks", metavar="NAME,...", help="default: the paper's seven, without --data those that ship")
    add("--temperatures", default="0,1", metavar="T,...")
    add("--sizes", default="4,8-24,32", metavar="B,...", help="block sizes to replay (default: %(default)s)")
    own_help = "block sizes that a GPU runs without padding (default: %(default)s)"
    add("--own-shapes", default="14-18", metavar="B,...", help=own_help)
    pilot_help = "prompt files that the pilot is trained on"
    add("--pilot-prompts", nargs="+", action="extend", required=True, metavar="FILE", help=pilot_help)
    each_help = "the first N prompts of each file, 0: all (default: %(default)s, as in the released files)"
    add("--pilot-prompts-each", type=int, default=100, metavar="N", help=each_help)
    add("--num-prompts", type=int, default=16, metavar="N", help="timed, of each task (default: %(default)s)")
    replay_help = "replayed, of each task; 0: all (default: %(default)s)"
    add("--replay-prompts", type=int, default=64, metavar="N", help=replay_help)
    add("--calibration-prompts", type=int, default=1, metavar="N", help="of each task (default: %(default)s)")
    add("--max-new-tokens", type=int, default=1024, metavar="N", help="default: %(default)s")
    add("--score-code", action="store_true", help="run the programs of code answers, confined but on this machine")
    add("--drafter-data", type=Path, metavar="DIR", help="what `blockpilot synthesize` wrote for the drafter")
    add("--minutes", type=float, metavar="N", help="stop after N minutes (default: at the end)")
    add("--report", action="store_true", help="write the report of what is there")
    add("--quick", action="store_true", help="a narrow network, few steps: does it run?")
    return parser


def main() -> None:
    arguments = build_parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        sys.exit(run(arguments))
    except BlockPilotError as error:
        logger.error("paper_tables: %s", error)
        sys.exit(error.exit_code)


def run(arguments: argparse.Namespace) -> int:
    config, out = read_config(arguments), arguments.out
    with hold_folder(out, "paper_tables.py"):
        stages = prepare(config, out)
        stopped = None if arguments.report else run_stages(stages, arguments.minutes)
        evidence = read_evidence(config, out)
        path = out / "report.md"
        figures = _draw(evidence, out)
        write_text(path, write_report(evidence, figures, out, [_tell_prompts(config, arguments.drafter_data)]))
        if runs := list_runs(evidence):
            build_report([out / "tables" / run.name for run in runs], out / "bench-report")
    if stopped is not None:
        logger.info("time is up in %r: the same command goes on; %s tells what is there", stopped.name, path)
        return TIME_IS_UP
    print(path)
    return 0


def read_config(arguments: argparse.Namespace) -> StudyConfig:
    given: dict[str, Any] = {field.name: getattr(arguments, field.name) for field in fields(StudyConfig)}
    if arguments.tasks is None:
        tasks = tuple(name for name in PAPER_TASKS if arguments.data or name not in NOT_SHIPPED)
    else:
        tasks = tuple(arguments.tasks.split(","))
    temperatures = read_list(arguments.temperatures, "--temperatures", float, "give numbers such as 0,1")
    if arguments.drafter == "auto":
        if (shipped := shipped_drafter(arguments.target)) is None:
            raise InputError(f"no DFlash drafter ships for {arguments.target}: give --drafter")
        given["drafter"] = shipped
    given |= {"tasks": tasks, "temperatures": tuple(dict.fromkeys(temperatures))}
    return StudyConfig(**given | {"pilot_prompts": tuple(arguments.pilot_prompts)})


def _draw(evidence: Any, out: Path) -> list[Path]:
    try:
        return draw_figures(evidence, out)
    except ImportError as error:
        logger.info("no figures (%s): --report draws them where Matplotlib is installed", error)
        return []


def _tell_prompts(config: StudyConfig, drafter_data: Path | None) -> str:
    """Whether drafter and pilot were trained on the same prompts."""
    names = {Path(name).name for name in config.pilot_prompts}
    trained_on = f"The pilot is trained on {', '.join(sorted(names))}"
    if drafter_data is None:
        return f"{trained_on}. Whether the drafter was, too, was not checked (`--drafter-data`)."
    manifest = read_json(drafter_data / "manifest.json") or {}
    config_of_data = manifest.get("config", {})
    excluded, used = (
        {Path(name).name for name in config_of_data.get(key, ())} for key in ("excluded_files", "prompt_files")
    )
    if shared := names & used:
        return f"{trained_on}. The drafter was trained on {', '.join(sorted(shared))}, too."
    if names <= excluded:
        return f"{trained_on}. Prompts that share 13 words in a row with these were left out of the drafter's text."
    return f"{trained_on}. The drafter's text is of other files, and shared words were not looked for."


if __name__ == "__main__":
    main()
