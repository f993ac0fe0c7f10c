"""Training data without a dataset: the target writes prompts and answers them.

Two phases, both resumable. First the prompts: sampled from the bare chat prefix (everything the template puts before
the user's words), together with any prompt files; deduplicated and written once. Then the answers, shard by shard:
greedy for most prompts, sampled for some, each cut where it starts to repeat itself, because a drafter trained on loops
learns to loop.
"""

import itertools
import json
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.models.loading import LoadedTarget
from blockpilot.text.prompts import read_prompts
from blockpilot.text.repetition import find_loop, without_overlap
from blockpilot.text.tokenizer import Tokenizer
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.responses import Response, ResponseFolder
from blockpilot.training.stopping import is_out_of_memory

PROMPTS_FILE = "prompts.json"
REPORT_EVERY = 512
_PLACEHOLDER = "\u2063PROMPT\u2063"

Report = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    target: str
    num_written: int  # prompts the target writes itself (attempts; some are dropped)
    starts: tuple[str, ...] = ("",)  # first words of written prompts, in turn; "" leaves all to the target
    prompt_files: tuple[str, ...] = ()
    excluded_files: tuple[str, ...] = ()  # prompts that share 13 words in a row with one of these are left out
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.8)  # each prompt draws one of these
    max_length: int = 448  # prompt and answer together
    max_prompt_length: int = 224
    min_answer_length: int = 8
    num_rows: int = 64
    shard_size: int = 16384
    seed: int = 0


def synthesize(config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report) -> ResponseFolder:
    """Run both phases into `out`, continuing whatever is there."""
    if not target.tokenizer.has_chat_template:
        raise InputError(f"{target.name} has no chat template, so nobody could ask the drafter's target a question")
    folder = ResponseFolder(out)
    _check_manifest(folder, config)
    try:
        _write_all(config, target, folder, report)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise BlockPilotError("out of memory: lower --rows and give the same command again to go on") from error
    return folder


def _write_all(config: SynthesisConfig, target: LoadedTarget, folder: ResponseFolder, report: Report) -> None:
    prompts = _load_or_write_prompts(config, target, folder.folder / PROMPTS_FILE, report)
    temperatures = random.Random(config.seed).choices(config.temperatures, k=len(prompts))
    num_shards = -(-len(prompts) // config.shard_size)
    for index in range(num_shards):
        if folder.shard_path(index).is_file():
            continue
        share = slice(index * config.shard_size, (index + 1) * config.shard_size)
        rows = [
            Row(ids, temperature, config.max_length)
            for ids, temperature in zip(prompts[share], temperatures[share], strict=True)
        ]
        folder.write_shard(index, _answer(config, target, rows, index, report))
    everything = folder.read()
    counts = {"num_texts": len(everything), "num_answer_tokens": everything.num_answer_tokens, "num_shards": num_shards}
    folder.write_manifest({"config": _config_dict(config), "is_complete": True, **counts})


def chat_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of everything the chat template writes before the user's own words."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}])
    before, found, _ = text.partition(_PLACEHOLDER)
    if not found or not before:
        raise InputError(
            "the target's chat template writes nothing before the user's words, so it cannot write prompts: "
            "give --prompts FILE and --num-prompts 0"
        )
    return tokenizer.encode(before)


def _load_or_write_prompts(
    config: SynthesisConfig, target: LoadedTarget, path: Path, report: Report
) -> list[list[int]]:
    if path.is_file():
        return _load_prompts(path)
    texts = [prompt.text for name in config.prompt_files for prompt in read_prompts(Path(name))]
    if config.num_written:
        texts += _write_prompts(config, target, report)
    unique = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    if config.excluded_files:
        excluded = [prompt.text for name in config.excluded_files for prompt in read_prompts(Path(name))]
        unique = without_overlap(unique, excluded)
    encoded = [target.tokenizer.encode_chat(text) for text in unique]
    kept = [ids for ids in encoded if len(ids) <= config.max_prompt_length]
    if not kept:
        raise InputError(
            f"none of {len(unique)} prompts fits into {config.max_prompt_length} tokens: raise --max-length"
        )
    random.Random(config.seed).shuffle(kept)
    write_text(path, json.dumps(kept, separators=(",", ":")))
    return kept


def _load_prompts(path: Path) -> list[list[int]]:
    try:
        return [list(ids) for ids in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise InputError(f"{path} is not readable: {error}; delete it with the shards beside it") from error


def _write_prompts(config: SynthesisConfig, target: LoadedTarget, report: Report) -> list[str]:
    """The target as its own user: it goes on behind the chat prefix until it ends its turn."""
    prefix = chat_prefix(target.tokenizer)
    starts = [target.tokenizer.encode(start) for start in config.starts]
    for text, ids in zip(config.starts, starts, strict=True):
        if len(ids) >= config.max_prompt_length:
            raise InputError(f"--start {text!r} alone has {len(ids)} tokens of {config.max_prompt_length}")
    limit = len(prefix) + config.max_prompt_length
    generator = _generator(config, target, capacity=limit + 1, seed=config.seed)
    rows = [Row(prefix + starts[index % len(starts)], 1.0, limit) for index in range(config.num_written)]
    for done, _ in enumerate(generator.run(iter(rows)), start=1):
        if done % REPORT_EVERY == 0 or done == config.num_written:
            report("writing prompts", done, config.num_written)
    is_whole = [row.answer_ids[-1] in generator.eos_token_ids and len(row.answer_ids) > 3 for row in rows]
    return [
        target.tokenizer.decode(row.prompt_ids[len(prefix) :] + row.answer_ids)
        for row in itertools.compress(rows, is_whole)
    ]


def _answer(
    config: SynthesisConfig, target: LoadedTarget, rows: list[Row], shard: int, report: Report
) -> list[Response]:
    """Answers in the order of their prompts: rows finish short ones first, and held-out texts are the last ones."""
    generator = _generator(config, target, capacity=config.max_length + 1, seed=config.seed * 1000003 + shard + 1)
    started, num_tokens = time.perf_counter(), 0
    for done, row in enumerate(generator.run(iter(rows)), start=1):
        num_tokens += len(row.answer_ids)
        if done % REPORT_EVERY == 0 or done == len(rows):
            rate = num_tokens / (time.perf_counter() - started)
            report(f"answers of shard {shard} ({rate:,.0f} tokens/s)", done, len(rows))
    answers = [row.answer_ids[: find_loop(row.answer_ids)] for row in rows]
    return [
        Response(row.prompt_ids + answer, len(row.prompt_ids))
        for row, answer in zip(rows, answers, strict=True)
        if len(answer) >= config.min_answer_length
    ]


def _generator(config: SynthesisConfig, target: LoadedTarget, *, capacity: int, seed: int) -> BulkGenerator:
    eos = target.tokenizer.eos_token_ids or target.decoder.config.eos_token_ids
    return BulkGenerator(target.decoder, num_rows=config.num_rows, capacity=capacity, eos_token_ids=eos, seed=seed)


def _config_dict(config: SynthesisConfig) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(config)))


def _check_manifest(folder: ResponseFolder, config: SynthesisConfig) -> None:
    """Continue only a run of the same configuration; `num_rows` may change, because memory may not allow it."""
    manifest = folder.read_manifest()
    if manifest is None:
        folder.write_manifest({"config": _config_dict(config), "is_complete": False})
        return
    found = manifest.get("config") or {}
    for key, value in _config_dict(config).items():
        if found.get(key) != value and key != "num_rows":
            raise InputError(
                f"{folder.folder} belongs to another run: {key} is {found.get(key)!r} there and {value!r} here; "
                "choose another --out"
            )
