"""Other engines on the same prompts, weights, threads and machine, in one run: how fast, and is the text the same?

    python benchmarks/peers.py [--tasks gsm8k,humaneval] [--num-prompts 4] [--max-new-tokens 128] [--out DIR]
    python benchmarks/peers.py --peers llama.cpp,llama.cpp-lookup,llama.cpp-q4_0 --prefill 128,512
    python benchmarks/peers.py --device cuda

Needs more than BlockPilot itself; a peer whose package is missing is skipped with one line:

    pip install -e '.[compiled,peers]'       transformers with what it needs to read GGUF files
    pip install llama-cpp-python        is compiled; CMAKE_ARGS=-DGGML_NATIVE=ON uses all this CPU offers
    pip install --no-deps dflash        the loop of DFlash's authors, for a GPU (its pinned versions are not needed)

On a CPU: `transformers` (plain, and with prompt lookup), llama.cpp on the same GGUF file, plain (`llama.cpp`), with the
prompt lookup of llama-cpp-python (`llama.cpp-lookup`), and on that file requantized to Q4_0, a layout for which it has
faster products (`llama.cpp-q4_0`: weights rounded twice, so another model with texts of its own). On a GPU:
`transformers` (plain, static cache, static cache and compiled), the package `dflash`. Beside them BlockPilot: `ar`,
`best-fixed` (chosen on calibration prompts) and `auto`, on a CPU in int8 where the target is a quantized file
(`--dtype float32` for the other form); `--methods ar,ngram:4` names others. Greedy, one request at a time, the first
turn of every prompt. Everyone answers the longest prompt once to warm up, then all answer each prompt in an order
shuffled anew. Decoding is timed from the first token on; `first token` is the median time until then. `over llama.cpp`
pairs prompts as `over ar` does.

`--prefill 128,512` also times the reading of prompts of so many tokens, in turns: medians of `PREFILL_REPEATS`.

As on a CPU without AVX-512 and VNNI: with BLOCKPILOT_CPU for our kernels, ATEN_CPU_CAPABILITY for what PyTorch computes
beside them, and another build of llama.cpp, in a folder of its own. The manifest says what that build has (`system`).

    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX_VNNI=OFF -DGGML_AVX2=ON -DGGML_FMA=ON"
    export CMAKE_ARGS="$CMAKE_ARGS -DGGML_F16C=ON"
    pip install --target avx2 --no-deps --no-cache-dir --no-binary llama-cpp-python llama-cpp-python
    PYTHONPATH=avx2 BLOCKPILOT_CPU=avx2 ATEN_CPU_CAPABILITY=avx2 python benchmarks/peers.py

`--seconds` ends a run early with the rows of what is done. A round (a prompt answered by everyone) is not cut, and
rounds take the tasks in turns. A peer that fails while it warms up is skipped like one that is missing.

Prints a table; `--out` gets `rows.jsonl` (per task, their mean, and `prefill:N`), `answers.jsonl`, `differences.jsonl`
and `manifest.json`.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from peer_engines import CPU_PEERS, GPU_PEERS, LLAMA, Contestant, Ours, Peers, PeerSettings, Reply, SkippedError

from blockpilot.bench import manifest as manifests
from blockpilot.bench.answers import Answer, AnswersFile, RoundKey, plain_answers, select
from blockpilot.bench.audit import Difference, Judge, Place, find_differences, group_differences
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.methods import choose_drafters, parse_methods
from blockpilot.bench.plan import Round, encode_turn
from blockpilot.bench.run import BenchRun
from blockpilot.bench.site import BenchSetup, LocalSite
from blockpilot.bench.statistics import add_up, mean, speedup, speedup_interval
from blockpilot.bench.tasks import read_task
from blockpilot.cli.console import print_columns, show_counted
from blockpilot.core.config import EngineConfig
from blockpilot.core.device import torch_dtype
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.models.loading import load_target
from blockpilot.text.tokenizer import Tokenizer

METHODS = "ar,best-fixed,auto"
READERS = ("ar", "auto", LLAMA, f"{LLAMA}-q4_0")  # whose reading of prompts `--prefill` times
PREFILL_REPEATS = 7
Row = dict[str, Any]


def compare(arguments: argparse.Namespace, out: Path) -> tuple[list[Row], list[Row]]:
    """Rows of answers, and of prompts that were read."""
    deadline = time.perf_counter() + arguments.seconds
    if out.exists() and any(out.iterdir()):
        raise InputError(f"{out} is not empty: choose another --out")
    known = dict.fromkeys([*CPU_PEERS, *GPU_PEERS])
    for name in [] if arguments.peers is None else arguments.peers.split(","):
        if name not in known:
            raise InputError(f"unknown peer {name!r}; known: {', '.join(known)}")
    setup = make_setup(arguments)
    site = LocalSite(setup)
    places = {(task.name, prompt.id): Place(prompt, 0) for task in site.fit.tasks for prompt in task.prompts}
    judge = Judge(site.plain, setup.config, places)  # other engines round differently
    if max(arguments.prefill, default=0) >= site.fit.context_length:
        raise InputError(f"--prefill {max(arguments.prefill)} does not fit the context of {site.fit.context_length}")
    with show_counted("answers, choosing best-fixed") as report:
        run = BenchRun(setup, site, out, report)
        methods = run.choose_methods()
    ours = [Ours(site.llms[method.drafter], method) for method in methods]
    peers, skipped = build_peers(arguments, setup, site)
    encoded = {work.key: encode_turn(site.tokenizer, work.prompts[0], []) for work in run.rounds}
    longest = max(encoded.values(), key=len)
    contestants = warm_up([*ours, *peers], longest, setup.config.max_new_tokens, skipped)
    file = AnswersFile(out / "answers.jsonl")
    for answer in measure(contestants, run.rounds, encoded, site.tokenizer, setup.config, deadline):
        file.append([answer])
    answers = file.answers
    readers = [contestant for contestant in contestants if contestant.name in READERS]
    read_seconds = time_reading(readers, encoded.values(), arguments.prefill)
    differences = find_differences(answers, plain_answers(answers), judge)
    names = [contestant.name for contestant in contestants]
    rows = build_rows(answers, differences, names, run.manifest["id"])
    read_rows = build_read_rows(read_seconds, run.manifest["id"])
    about = {contestant.name: contestant.about for contestant in contestants}
    is_complete = len(answers) == len(run.rounds) * len(contestants)
    run.manifest |= {"is_complete": is_complete, "contestants": about, "skipped": skipped, "near_tie_gap": judge.most}
    for name, lines in (("rows", rows + read_rows), ("differences", group_differences(differences))):
        write_text(out / f"{name}.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    manifests.write(out, run.manifest)
    return rows, read_rows


def make_setup(arguments: argparse.Namespace) -> BenchSetup:
    engine = EngineConfig(device=arguments.device, dtype=arguments.dtype)
    methods = parse_methods(arguments.methods.split(","), device=arguments.device, target=arguments.target)
    tasks = tuple(
        read_task(name.strip(), data=arguments.data, split="test").first_turns() for name in arguments.tasks.split(",")
    )  # a second turn would start from different first answers where engines differ
    config = BenchConfig(
        tasks=tuple(task.name for task in tasks),
        methods=tuple(method.name for method in methods),
        num_prompts=arguments.num_prompts,
        max_new_tokens=arguments.max_new_tokens,
        repeats=arguments.repeats,
        calibration_prompts=arguments.calibration_prompts,
    )
    return BenchSetup(
        config=config,
        methods=methods,
        tasks=tasks,
        target=load_target(arguments.target, torch_dtype(engine.dtype)),
        drafters=choose_drafters(methods, arguments.target, {"dflash": arguments.drafter}),
        engine=engine,
    )


def build_peers(
    arguments: argparse.Namespace, setup: BenchSetup, site: LocalSite
) -> tuple[list[Contestant], dict[str, str]]:
    """Those that can take part, and why the others do not."""
    assert not isinstance(setup.target, str)
    drafter, dtype = setup.drafters.get("dflash", "none"), site.plain.config.dtype
    assert isinstance(drafter, str)
    peers = Peers(
        PeerSettings(
            weights=setup.target.path,
            drafter=drafter,
            device=setup.engine.device,
            dtype="float32" if dtype == "int8" else dtype,
            context_length=site.fit.context_length,
            num_threads=torch.get_num_threads(),
            eos_token_ids=tuple(site.plain.engine.eos_token_ids),
        )
    )
    usual = CPU_PEERS if setup.engine.device == "cpu" else GPU_PEERS
    found, skipped = [], {}
    for name in usual if arguments.peers is None else arguments.peers.split(","):
        try:
            found.append(peers.build(name))
        except SkippedError as reason:
            skipped[name] = str(reason)
            print(f"skipped {name}: {reason}", file=sys.stderr)
    return found, skipped


def warm_up(
    contestants: Sequence[Contestant], prompt_ids: list[int], max_new_tokens: int, skipped: dict[str, str]
) -> list[Contestant]:
    """Everybody answers once: compiles, packs, measures step costs. Returns those that could."""
    ready = []
    with show_counted("warmed up") as report:
        for place, contestant in enumerate(contestants):
            report(f"warming up {contestant.name}", place, len(contestants))
            try:
                contestant.answer(prompt_ids, max_new_tokens)
            except Exception as error:
                if isinstance(contestant, Ours):
                    raise
                skipped[contestant.name] = f"{type(error).__name__}: {error}"
                print(f"skipped {contestant.name}: {skipped[contestant.name]}", file=sys.stderr)
            else:
                ready.append(contestant)
    return ready


def measure(
    contestants: Sequence[Contestant],
    rounds: Sequence[Round],
    encoded: Mapping[RoundKey, list[int]],
    tokenizer: Tokenizer,
    config: BenchConfig,
    deadline: float,
) -> Iterator[Answer]:
    """Everybody's answer to every prompt, in turns; after the deadline no further round begins."""
    with show_counted("answers") as report:
        for place, work in enumerate(rounds):
            if place and time.perf_counter() > deadline:
                print(f"out of time after {place} of {len(rounds)} rounds", file=sys.stderr)
                return
            for turn, contestant in enumerate(work.shuffle(contestants, config.seed)):
                reply = contestant.answer(encoded[work.key], config.max_new_tokens)
                yield record(work, contestant.name, reply, encoded[work.key], tokenizer)
                done = place * len(contestants) + turn + 1
                report(f"{work.task}, {contestant.name}", done, len(rounds) * len(contestants))


def time_reading(
    readers: Sequence[Contestant], prompts: Iterable[Sequence[int]], lengths: Sequence[int]
) -> dict[tuple[int, str], list[float]]:
    """Seconds by length and name for prompts of exactly so many tokens, cut from the given ones; in a shuffled order.

    Everyone reads every length once before it counts.
    """
    order = random.Random(0)
    seconds: dict[tuple[int, str], list[float]] = {(length, one.name): [] for length in lengths for one in readers}
    endless = cycle(chain.from_iterable(prompts))
    for length in lengths:
        prompt_ids = list(islice(endless, length))
        for repeat in range(PREFILL_REPEATS + 1):
            for reader in order.sample(list(readers), len(readers)):
                reply = reader.answer(prompt_ids, 1)
                if repeat:
                    seconds[length, reader.name].append(reply.prefill_seconds)
    return seconds


def record(work: Round, name: str, reply: Reply, prompt_ids: list[int], tokenizer: Tokenizer) -> Answer:
    """In the form that `blockpilot bench` counts; steps of other engines are not known, only their sum."""
    num_emitted = len(reply.token_ids) - reply.num_first
    return Answer(
        task=work.task,
        prompt_id=work.prompts[0].id,
        batch=work.batch,
        turn=0,
        repeat=work.repeat,
        method=name,
        token_ids=reply.token_ids,
        text=tokenizer.decode(reply.token_ids),
        num_prompt_tokens=len(prompt_ids),
        finish_reason="stop" if reply.token_ids[-1] in tokenizer.eos_token_ids else "length",
        block_sizes=[],
        verify_sizes=[],
        emitted=[num_emitted] if num_emitted else [],
        prefill_seconds=reply.prefill_seconds,
        decode_seconds=reply.decode_seconds if num_emitted else 0.0,
        draft_seconds=0.0,
        verify_seconds=0.0,
        pilot_seconds=0.0,
        peak_memory_bytes=0,
    )


def build_rows(
    answers: Sequence[Answer], differences: Sequence[Difference], names: Sequence[str], manifest: str
) -> list[Row]:
    """One per task and contestant; the mean weighs tasks alike and draws prompts within them."""
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    measured = {(task, name): add_up(select(answers, task=task, method=name)) for task in tasks for name in names}
    theirs = {(answer.task, answer.prompt_id): answer.token_ids for answer in first_answers(answers, LLAMA)}
    rows = []
    for chosen in [*([task] for task in tasks), *([tasks] if len(tasks) > 1 else [])]:
        for name in names:
            row: Row = {"task": chosen[0] if len(chosen) == 1 else "mean", "method": name}
            row["tokens_per_second"] = mean(measured[task, name].tokens_per_second for task in chosen)
            for field, other in (("ratio", "ar"), ("llama_ratio", LLAMA)):
                pairs = [(measured[task, name], measured[task, other]) for task in chosen if other in names]
                row[field] = mean(speedup(*pair) for pair in pairs)
                row[f"{field}_ci"] = speedup_interval(pairs)
            seconds = [[a.prefill_seconds for a in select(answers, task=task, method=name)] for task in chosen]
            row["first_token_ms"] = mean(1e3 * median(one) for one in seconds)
            own = [answer for answer in first_answers(answers, name) if answer.task in chosen]
            odd = [d for d in differences if d.task in chosen and d.method == name and d.repeat == 0]
            same = [theirs.get((answer.task, answer.prompt_id)) == answer.token_ids for answer in own]
            row |= {"num_prompts": len(own), "num_tokens": sum(len(answer.token_ids) for answer in own)}
            row |= {"equal_share": 1 - len(odd) / len(own), "first_difference": first_of(odd)}
            row |= {"llama_equal_share": sum(same) / len(own) if theirs else None, "manifest": manifest}
            rows.append(row)
    return rows


def first_answers(answers: Sequence[Answer], method: str) -> list[Answer]:
    return [answer for answer in select(answers, method=method) if answer.repeat == 0]


def build_read_rows(seconds: Mapping[tuple[int, str], Sequence[float]], manifest: str) -> list[Row]:
    """One per length and reader: the median, what it means in tokens per second, and how much faster than llama.cpp."""
    rows = []
    for (length, name), own in seconds.items():
        theirs = seconds.get((length, LLAMA))
        row: Row = {"task": f"prefill:{length}", "method": name, "num_tokens": length}
        row |= {"milliseconds": 1e3 * median(own), "tokens_per_second": length / median(own)}
        row |= {"llama_ratio": None if theirs is None else median(theirs) / median(own)}
        rows.append(row | {"seconds": list(own), "manifest": manifest})
    return rows


def first_of(differences: Sequence[Difference]) -> dict[str, Any] | None:
    """The earliest place where a text leaves that of `ar`; `gap`: how far the score of its token was from the best."""
    found = min(differences, key=lambda difference: difference.position, default=None)
    if found is None:
        return None
    return {"task": found.task, "prompt_id": found.prompt_id, "position": found.position, "gap": found.gap}


def print_table(rows: Sequence[Row]) -> None:
    """The mean of the tasks, or the only one."""
    shown = [row for row in rows if row["task"] == rows[-1]["task"]]
    columns = {
        "engine": [row["method"] for row in shown],
        "tokens/s": [_number(row["tokens_per_second"], 1) for row in shown],
        "over ar (95 %)": [_interval(row, "ratio") for row in shown],
        f"over {LLAMA} (95 %)": [_interval(row, "llama_ratio") for row in shown],
        "first token": [f"{row['first_token_ms']:.1f} ms" for row in shown],
        "same text": [f"{row['equal_share']:.0%}" for row in shown],
        "first difference": [_place(row["first_difference"]) for row in shown],
    }
    if all(row["llama_ratio"] is None for row in shown):  # it did not take part
        del columns[f"over {LLAMA} (95 %)"]
    print_columns(columns)


def print_read_table(rows: Sequence[Row]) -> None:
    columns = {
        "prompt": [f"{row['num_tokens']} tokens" for row in rows],
        "engine": [row["method"] for row in rows],
        "read in": [f"{row['milliseconds']:.1f} ms" for row in rows],
        "tokens/s": [_number(row["tokens_per_second"], 0) for row in rows],
        f"over {LLAMA}": [_number(row["llama_ratio"], 2) for row in rows],
    }
    print_columns(columns)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(row: Row, field: str) -> str:
    low_high = row[f"{field}_ci"]
    return _number(row[field], 2) + (f" ({low_high[0]:.2f} to {low_high[1]:.2f})" if low_high else "")


def _place(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    gap = "one text ends" if found["gap"] is None else f"gap {found['gap']:.2g}"
    return f"{found['prompt_id']}, token {found['position']}, {gap}"


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="gsm8k,math500,humaneval,mt_bench")
    parser.add_argument("--data", type=Path, help="whole prompt sets, as for `blockpilot bench`")
    parser.add_argument("--num-prompts", type=int, default=4, help="per task")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--calibration-prompts", type=int, default=2, help="per task, for best-fixed")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--methods", default=METHODS, help=f"of BlockPilot (default: {METHODS})")
    parser.add_argument("--drafter", default="auto")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    dtype_help = "default auto: on a CPU int8 for quantized files, else float32; bfloat16 on a GPU"
    parser.add_argument("--dtype", default="auto", help=dtype_help)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of every engine")
    parser.add_argument("--peers", help=f"default: {','.join(CPU_PEERS)}; on a GPU {','.join(GPU_PEERS)}")
    prefill_help = "also time the reading of prompts of so many tokens, such as 128,512"
    parser.add_argument("--prefill", type=read_numbers, default=[], metavar="N,...", help=prefill_help)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no round later than this")
    parser.add_argument("--out", type=Path, help="default: a new folder under runs/")
    return parser.parse_args(words)


def read_numbers(text: str) -> list[int]:
    numbers = [int(word) for word in text.split(",")]
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError("a prompt has at least one token")
    return numbers


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse_arguments(words)
    torch.set_num_threads(arguments.threads)
    out = arguments.out or Path("runs") / f"peers-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        rows, read_rows = compare(arguments, out)
    except BlockPilotError as error:
        print(f"peers: error: {error}", file=sys.stderr)
        return error.exit_code
    print_table(rows)
    if read_rows:
        print_read_table(read_rows)
    print(f"rows and manifest are in {out}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
