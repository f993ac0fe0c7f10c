"""How far is a precision from float32? Next tokens and their probabilities on the same text, ours and llama.cpp's.

    python benchmarks/precision.py [--tasks gsm8k,humaneval] [--num-prompts 4] [--max-new-tokens 128] [--out FILE]
    python benchmarks/precision.py --scores --tasks gsm8k,math500 --num-prompts 50 --max-new-tokens 256

The target answers test prompts greedily in float32. Then every precision reads prompts and answers (teacher forcing:
whatever it would have said, the text goes on as it is), and at every token of an answer it is seen what it expected:

same next token   share of positions where its most likely token is that of float32
divergence        mean Kullback-Leibler divergence of its probabilities from those of float32, in nats; 0: equal
largest gap       where the most likely tokens differ: by how much float32 scores its own higher, at most. A small gap
                  is a near-tie, which any other rounding may decide the other way
right answers     with `--scores`: share of prompts with a known result that it answers rightly, in its own words. The
                  default model is right so rarely that this separates precisions only over hundreds of prompts

All of them multiply by the weights of the same file, whatever its makers rounded them to, and differ in activations,
sums and cache; but `llama.cpp-q4_0` rounds the weights once more. llama.cpp needs llama-cpp-python and a GGUF file, and
is skipped with one line otherwise. Prints a table; `--out` writes it with commit, versions and settings as JSON.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peer_engines import LLAMA, LlamaCpp, Ours, PeerSettings, SkippedError
from torch import Tensor

from blockpilot import LLM, EngineConfig, __version__
from blockpilot.bench.config import BenchConfig
from blockpilot.bench.manifest import git_commit
from blockpilot.bench.methods import NO_DRAFTER, Method
from blockpilot.bench.plan import encode_turn, fit_prompts
from blockpilot.bench.scoring import is_right
from blockpilot.bench.tasks import read_task
from blockpilot.cli.console import print_columns, show_counted
from blockpilot.core.config import MAX_TREE_NODES, cpu_name
from blockpilot.core.errors import BlockPilotError
from blockpilot.core.files import write_text
from blockpilot.core.tree import DraftTree
from blockpilot.models.loading import LoadedTarget, load_target

Row = dict[str, Any]


class OurReader(Ours):
    def __init__(self, llm: LLM) -> None:
        super().__init__(llm, Method(llm.config.dtype, NO_DRAFTER, "ar"))
        self.about = {"linear_backend": llm.linear_backend}

    def read(self, prompt_ids: list[int], answer_ids: list[int]) -> Tensor:
        """Logits [tokens of the answer, V]: what was expected before each of them."""
        runner, ids, found = self.llm.engine.runner, [prompt_ids[-1], *answer_ids[:-1]], []
        slot = runner.cache.reserve()
        try:
            if len(prompt_ids) > 1:
                runner.prefill([(slot, prompt_ids[:-1])], ())
            for start in range(0, len(ids), MAX_TREE_NODES):
                piece = ids[start : start + MAX_TREE_NODES]
                found.append(runner.verify([(slot, DraftTree.chain(piece[0], piece[1:]))], ()).logits.float())
                runner.keep([(slot, range(len(piece)))])
        finally:
            runner.cache.free(slot)
        return torch.cat(found)


class LlamaReader(LlamaCpp):
    def read(self, prompt_ids: list[int], answer_ids: list[int]) -> Tensor:
        self.model.reset()
        self.model.eval([*prompt_ids, *answer_ids[:-1]])
        return torch.tensor(self.model.scores[len(prompt_ids) - 1 :][: len(answer_ids)])


Reader = OurReader | LlamaReader


def measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    """Rows, and what they were measured with."""
    tasks = [read_task(name, data=arguments.data, split="test").first_turns() for name in arguments.tasks.split(",")]
    bounds = {"num_prompts": arguments.num_prompts, "max_new_tokens": arguments.max_new_tokens}
    config = BenchConfig(tasks=tuple(task.name for task in tasks), methods=("ar",), **bounds)
    target = load_target(arguments.target, torch.float32)
    fit = fit_prompts(tasks, target.tokenizer, config, target.decoder.config.context_length)
    exact, *others = build_readers(arguments, target, fit.context_length)
    found: dict[str, list[Tensor]] = {reader.name: [] for reader in others}
    verdicts: dict[str, list[bool]] = {reader.name: [] for reader in [exact, *others]}
    prompts = [prompt for task in fit.tasks for prompt in task.prompts]
    with show_counted("prompts") as report:
        for place, prompt in enumerate(prompts, start=1):
            prompt_ids = encode_turn(target.tokenizer, prompt, [])
            answer_ids = exact.answer(prompt_ids, arguments.max_new_tokens).token_ids
            expected = exact.read(prompt_ids, answer_ids)
            for reader in others:
                found[reader.name].append(compare(reader.read(prompt_ids, answer_ids), expected))
            for reader in [exact, *others] if arguments.scores and prompt.answer is not None else ():
                own = answer_ids if reader is exact else reader.answer(prompt_ids, arguments.max_new_tokens).token_ids
                verdicts[reader.name].append(is_right(target.tokenizer.decode(own), prompt.answer))
            report(prompt.id, place, len(prompts))
    rows = [build_row(name, found.get(name, ()), own) for name, own in verdicts.items() if own or name in found]
    return rows, {
        "target": Path(arguments.target).name,
        "prompts": {task.name: {**task.source, "num_prompts": len(task.prompts)} for task in fit.tasks},
        "max_new_tokens": arguments.max_new_tokens,
        "num_threads": arguments.threads,
        "cpu": cpu_name(),
        "precisions": {reader.name: reader.about for reader in [exact, *others]},
        "versions": {"blockpilot": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "git_commit": git_commit(),
    }


def build_readers(arguments: argparse.Namespace, target: LoadedTarget, context_length: int) -> list[Reader]:
    """float32 first."""
    readers: list[Reader] = []
    for dtype in ["float32", *arguments.dtypes.split(",")]:
        config = EngineConfig(dtype=dtype, num_slots=1, context_length=context_length)
        model = target if dtype == "float32" else arguments.target
        readers.append(OurReader(LLM(model, drafter=None, pilot="ar", config=config)))
    settings = PeerSettings(target.path, context_length, arguments.threads, target.eos_token_ids)
    for name in (LLAMA, f"{LLAMA}-q4_0"):
        try:
            readers.append(LlamaReader(name, settings, is_requantized=name != LLAMA, has_all_logits=True))
        except SkippedError as reason:
            print(f"skipped {name}: {reason}", file=sys.stderr)
    return readers


def compare(logits: Tensor, expected: Tensor) -> Tensor:
    """[3, n] of two times [n, V]: whether the best token is the same, divergence from `expected`, and the gap of scores
    in `expected` between its own best token and that of `logits`."""
    best, other = expected.max(dim=-1), logits.argmax(dim=-1)
    wanted, found = expected.double().log_softmax(dim=-1), logits.double().log_softmax(dim=-1)
    divergence = (wanted.exp() * (wanted - found)).sum(dim=-1)
    gap = best.values - expected.gather(1, other[:, None])[:, 0]
    return torch.stack(((best.indices == other).double(), divergence, gap.double()))


def build_row(name: str, parts: Sequence[Tensor], verdicts: Sequence[bool]) -> Row:
    """Without parts: float32 itself, which is right or wrong and compared with nothing."""
    same, divergence, gap = torch.cat(list(parts), dim=1) if parts else torch.empty(3, 0)
    return {
        "precision": name,
        "num_positions": len(same),
        "same_next": same.mean().item() if parts else None,
        "divergence": divergence.mean().item() if parts else None,
        "largest_gap": gap.max().item() if parts else None,
        "num_scored": len(verdicts),
        "score": sum(verdicts) / len(verdicts) if verdicts else None,
    }


def print_rows(rows: Sequence[Row]) -> None:
    forms = {"same next token": ("same_next", ".2%"), "divergence": ("divergence", ".5f")}
    forms |= {"largest gap": ("largest_gap", ".2f"), "right answers": ("score", ".1%")}
    columns = {"precision": [row["precision"] for row in rows]}
    for heading, (field, form) in forms.items():
        if any(row[field] is not None for row in rows):
            columns[heading] = ["-" if row[field] is None else format(row[field], form) for row in rows]
    print_columns(columns)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="gsm8k,math500,humaneval,mt_bench")
    parser.add_argument("--data", type=Path, help="whole prompt sets, as for `blockpilot bench`")
    parser.add_argument("--num-prompts", type=int, default=4, help="per task")
    parser.add_argument("--max-new-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--target", default="smollm2-135m")
    parser.add_argument("--dtypes", default="int8", help="of our engine, such as int8,bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--scores", action="store_true", help="also count right answers")
    parser.add_argument("--out", type=Path, help="write rows and settings to this JSON file")
    arguments = parser.parse_args(words)
    torch.set_num_threads(arguments.threads)
    try:
        rows, about = measure(arguments)
    except BlockPilotError as error:
        print(f"precision: error: {error}", file=sys.stderr)
        return error.exit_code
    print_rows(rows)
    if arguments.out:
        write_text(arguments.out, json.dumps({"rows": rows, **about}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
