"""What is measured, as commands: each leaves a folder that says when it is complete, and goes on where it was stopped.

    traces      `collect`: what every block size emits on the pilot's training prompts, with whole logits
    sweep       `collect`: the same on test prompts
    networks    `pilot_experiments.py --part networks`: the network and its ablations, judged on the sweep, and tau
                of the sweep at every size (figures 3a to 3c, Table 1)
    held out    `collect`: a few of the test prompts, which `train-pilot` judges by
    pilot       `train-pilot --kind prefill`: the network that `bench` decodes with
    network     `benchmarks/pilot_network.py`: its time and memory
    table       `bench`: Table 2, with `best-fixed`, `best-fixed-tree` and `auto` beside it
    scores      `bench --methods ar`: more prompts for the tasks that can be scored

The report reads what networks, network, table and scores leave, a few megabytes. Traces, sweeps and pilots are large,
and made again where one of these needs them.
"""

import json
import os.path
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockpilot.bench.methods import PAPER, shipped_of_kind
from blockpilot.bench.tasks import TaskPrompts, read_task
from blockpilot.core.errors import InputError
from blockpilot.core.files import hash_file, write_text
from blockpilot.core.locks import LOCK
from blockpilot.core.manifests import MANIFEST, open_run
from blockpilot.core.reading import read_json

ROOT = Path(__file__).parents[2]
SCORED = ("gsm8k", "math500", "aime24", "humaneval", "mbpp")
PAPER_TASKS = ("gsm8k", "math500", "aime24", "humaneval", "mbpp", "swebench", "mt_bench")
FIXED_SIZES = (4, 8, 16, 32)
EXTRA_METHODS = ("best-fixed", "best-fixed-tree", "auto")
HELD_OUT = 2  # prompts of each task
QUICK_NETWORK = ("--hidden-size", "64", "--epochs", "2")


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Fields are named like the options of `paper_tables.py`."""

    target: str
    drafter: str
    eagle3: str
    device: str
    dtype: str | None
    data: str | None
    tasks: tuple[str, ...]
    temperatures: tuple[float, ...]
    sizes: str
    own_shapes: str
    pilot_prompts: tuple[str, ...]
    pilot_prompts_each: int
    num_prompts: int  # timed, of each task
    replay_prompts: int  # of each task
    calibration_prompts: int
    max_new_tokens: int
    score_code: bool
    quick: bool

    def identify(self, prompts: list[TaskPrompts]) -> dict[str, Any]:
        """What must be the same to go on: prompt files by name and checksum, wherever they lie."""
        files = {Path(name).name: hash_file(Path(name)) for name in self.pilot_prompts}
        tasks = {task.name: task.source for task in prompts}
        given = asdict(self) | {"pilot_prompts": files, "data": None, "tasks": tasks}
        return {"study": "paper tables", **json.loads(json.dumps(given))}


@dataclass(frozen=True)
class Stage:
    name: str
    words: tuple[str, ...]  # of `python`
    product: Path  # the file that is written last, or says whether all is there
    needs: tuple[str, ...] = ()  # stages whose folders it reads
    is_final: bool = True  # the report reads it; others are run only where they are needed

    @property
    def is_finished(self) -> bool:
        if not os.path.isfile(self.product):
            return False
        return self.product.name != MANIFEST or bool(read_json(self.product).get("is_complete", True))


def list_pending(stages: Sequence[Stage]) -> list[Stage]:
    """In order: final stages that are not finished, and what they need and is not there."""
    by_name = {stage.name: stage for stage in stages}
    left = [stage.name for stage in stages if stage.is_final]
    wanted = set()
    while left:
        if not (stage := by_name[left.pop()]).is_finished:
            wanted.add(stage.name)
            left += stage.needs
    return [stage for stage in stages if stage.name in wanted]


def read_tasks(config: StudyConfig) -> list[TaskPrompts]:
    data = None if config.data is None else Path(config.data)
    return [read_task(name, data=data, split="test") for name in config.tasks]


def prepare(config: StudyConfig, out: Path) -> list[Stage]:
    """Check what is given, begin or continue the study in `out`, and list what is to be done."""
    for name in config.pilot_prompts:
        if not os.path.isfile(name):
            raise InputError(f"prompt file {name} does not exist")
    if not os.path.isfile(out / MANIFEST) and {path.name for path in out.iterdir()} - {LOCK}:
        raise InputError(f"{out} holds other files and no {MANIFEST}: choose another --out")
    tasks = read_tasks(config)
    open_run(out, config.identify(tasks))
    for task in tasks:
        _write_prompts(out / "prompts" / f"{task.name}.jsonl", task, config.replay_prompts)
    return list(_list_stages(config, out))


def _write_prompts(path: Path, task: TaskPrompts, count: int) -> None:
    """The first turn of the prompts that `bench` takes first."""
    if not os.path.isfile(path):
        lines = [
            json.dumps({"id": prompt.id, "prompt": prompt.text}) + "\n" for prompt in task.prompts[: count or None]
        ]
        write_text(path, "".join(lines))


def name_of(temperature: float) -> str:
    return f"t{temperature:g}"


def methods_of(config: StudyConfig) -> list[str]:
    """Those of Table 2 for which there is a drafter."""
    has_eagle3 = config.eagle3 not in ("auto", "none") or (
        config.eagle3 == "auto" and shipped_of_kind("eagle3", config.target) is not None
    )
    fixed = [f"dflash:{size}" for size in FIXED_SIZES]
    return ["ar", *(["eagle3"] if has_eagle3 else []), *fixed, PAPER, *EXTRA_METHODS]


def _list_stages(config: StudyConfig, out: Path) -> Iterator[Stage]:
    pair = ["--target", config.target, "--drafter", config.drafter, "--device", config.device]
    pair += ["--dtype", config.dtype] if config.dtype else []
    for temperature in config.temperatures:
        name = name_of(temperature)
        yield from _replay_stages(config, out, pair, temperature)
        words = ["--kind", "prefill", "--traces", str(out / "traces" / name), "--device", config.device]
        words += ["--held-out", str(out / "held-out" / name), *(QUICK_NETWORK if config.quick else ())]
        needs = (f"traces {name}", f"held out {name}")
        yield _verb(f"pilot {name}", "train-pilot", words, out / "pilots" / name / "pilot.json", needs, is_final=False)
        if temperature == config.temperatures[0]:
            words = ["--pilot", str(out / "pilots" / name), "--device", config.device]
            yield _program("network", "benchmarks/pilot_network.py", words, out / "network.jsonl", (f"pilot {name}",))
        words = _table_words(config, out, temperature)
        yield _verb(f"table {name}", "bench", [*pair, *words], out / "tables" / name / MANIFEST, (f"pilot {name}",))
    scored = [task for task in config.tasks if task in SCORED]
    if scored and 0.0 in config.temperatures:
        words = ["--tasks", ",".join(scored), "--methods", "ar", "--concurrency", "8"]
        words += _bench_words(config, config.replay_prompts)
        yield _verb("scores", "bench", [*pair, *words], out / "scores" / MANIFEST)


def _replay_stages(config: StudyConfig, out: Path, pair: list[str], temperature: float) -> Iterator[Stage]:
    name = name_of(temperature)
    traces, sweep, networks = (out / kind / name for kind in ("traces", "sweeps", "networks"))
    record = [*pair, "--temperature", f"{temperature:g}", "--max-new-tokens", str(config.max_new_tokens)]
    record += ["--sizes", config.sizes, "--anchors", "visited", "--whole-logits", "--prompts"]
    test = [str(out / "prompts" / f"{task}.jsonl") for task in config.tasks]
    words = [*record, *config.pilot_prompts, "--num-prompts", str(config.pilot_prompts_each)]
    yield _verb(f"traces {name}", "collect", words, traces / MANIFEST, is_final=False)
    yield _verb(f"sweep {name}", "collect", [*record, *test], sweep / MANIFEST, is_final=False)
    words = ["--train", str(traces), "--test", str(sweep), "--part", "networks", "--device", config.device]
    words += ["--quick"] if config.quick else []
    needs = (f"traces {name}", f"sweep {name}")
    yield _program(f"networks {name}", "studies/pilot_experiments.py", words, networks / MANIFEST, needs)
    few, product = ["--num-prompts", str(HELD_OUT)], out / "held-out" / name / MANIFEST
    yield _verb(f"held out {name}", "collect", [*record, *test, *few], product, is_final=False)


def _table_words(config: StudyConfig, out: Path, temperature: float) -> list[str]:
    words = ["--tasks", ",".join(config.tasks), "--methods", ",".join(methods_of(config))]
    words += ["--eagle3", config.eagle3] if config.eagle3 not in ("auto", "none") else []
    words += ["--temperature", f"{temperature:g}", "--pilot-file", str(out / "pilots" / name_of(temperature))]
    words += ["--calibration-prompts", str(config.calibration_prompts), "--own-shapes", config.own_shapes]
    return words + _bench_words(config, config.num_prompts)


def _bench_words(config: StudyConfig, num_prompts: int) -> list[str]:
    words = ["--num-prompts", str(num_prompts), "--max-new-tokens", str(config.max_new_tokens)]
    words += ["--data", config.data] if config.data is not None else []
    return words + (["--score-code"] if config.score_code else [])


def _verb(
    name: str, verb: str, words: list[str], product: Path, needs: tuple[str, ...] = (), *, is_final: bool = True
) -> Stage:
    return Stage(name, ("-m", "blockpilot", verb, *words, "--out", str(product.parent)), product, needs, is_final)


def _program(name: str, path: str, words: list[str], product: Path, needs: tuple[str, ...]) -> Stage:
    place = product.parent if product.name == MANIFEST else product
    return Stage(name, (str(ROOT / path), *words, "--out", str(place)), product, needs)
