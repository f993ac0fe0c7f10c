"""Training data without a dataset: the target writes prompts and answers them.

Two phases, both resumable. First the prompts: sampled from the bare chat prefix (everything the template puts before
the user's words), together with any prompt files; deduplicated and written once. Then the answers, shard by shard:
greedy for most prompts, sampled for some, each cut where it starts to repeat itself, because a drafter trained on loops
learns to loop.
"""

import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from blockpilot.core.errors import InputError
from blockpilot.core.files import write_text
from blockpilot.models.loading import LoadedTarget
from blockpilot.text.loops import find_loop
from blockpilot.text.prompts import read_prompts
from blockpilot.text.tokenizer import Tokenizer
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.responses import Response, ResponseFolder

PROMPTS_FILE = "prompts.json"
_PLACEHOLDER = "\u2063PROMPT\u2063"

Report = Callable[[str, int, int], None]  # (what, done, total)


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    target: str
    num_written: int  # prompts the target writes itself (attempts; some are dropped)
    starts: tuple[str, ...] = ("",)  # first words of written prompts, in turn; "" leaves all to the target
    prompt_files: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.8)  # each prompt draws one of these
    max_length: int = 448  # prompt and answer together
    max_prompt_length: int = 224
    min_answer_length: int = 8
    num_rows: int = 64
    shard_size: int = 16384
    seed: int = 0


def synthesize(config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report) -> ResponseFolder:
    """Run both phases into `out`, continuing whatever is there."""
    folder = ResponseFolder(out)
    _check_manifest(folder, config)
    prompts = _load_or_write_prompts(config, target, out, report)
    temperatures = random.Random(config.seed).choices(config.temperatures, k=len(prompts))
    num_shards = -(-len(prompts) // config.shard_size)
    for index in range(num_shards):
        if (out / f"shard-{index:05d}.safetensors").is_file():
            continue
        rows = slice(index * config.shard_size, (index + 1) * config.shard_size)
        responses = _answer(config, target, list(zip(prompts[rows], temperatures[rows], strict=True)), index, report)
        folder.write_shard(index, responses)
    everything = folder.read()
    counts = {"num_texts": len(everything), "num_answer_tokens": everything.num_answer_tokens, "num_shards": num_shards}
    folder.write_manifest({"config": _config_dict(config), "is_complete": True, **counts})
    return folder


def chat_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of everything the chat template writes before the user's own words."""
    if not tokenizer.has_chat_template:
        raise InputError(
            "the target has no chat template, so it cannot write prompts: give --prompts FILE and 0 written"
        )
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}])
    before, found, _ = text.partition(_PLACEHOLDER)
    if not found or not before:
        raise InputError("the target's chat template hides the user's words: give --prompts FILE and 0 written")
    return tokenizer.encode(before)


def _load_or_write_prompts(config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report) -> list[list[int]]:
    path = out / PROMPTS_FILE
    if path.is_file():
        return [list(ids) for ids in json.loads(path.read_text(encoding="utf-8"))]
    texts = [prompt.text for name in config.prompt_files for prompt in read_prompts(Path(name))]
    if config.num_written:
        texts += _write_prompts(config, target, report)
    unique = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    encoded = [target.tokenizer.encode_chat(text) for text in unique]
    kept = [ids for ids in encoded if len(ids) <= config.max_prompt_length]
    if not kept:
        raise InputError(f"no prompt fits into max_prompt_length {config.max_prompt_length}")
    random.Random(config.seed).shuffle(kept)
    write_text(path, json.dumps(kept, separators=(",", ":")))
    return kept


def _write_prompts(config: SynthesisConfig, target: LoadedTarget, report: Report) -> list[str]:
    prefix = chat_prefix(target.tokenizer)
    starts = [target.tokenizer.encode(start) for start in config.starts]
    limit = len(prefix) + config.max_prompt_length
    generator = _generator(config, target, capacity=limit + 1, seed=config.seed)
    source = (Row(prefix + starts[i % len(starts)], 1.0, limit) for i in range(config.num_written))
    texts = []
    for done, row in enumerate(generator.run(source), start=1):
        if row.answer_ids[-1] in generator.eos_token_ids and len(row.answer_ids) > 3:
            texts.append(target.tokenizer.decode(row.prompt_ids[len(prefix) :] + row.answer_ids))
        if done % 512 == 0 or done == config.num_written:
            report("writing prompts", done, config.num_written)
    return texts


def _answer(
    config: SynthesisConfig, target: LoadedTarget, prompts: list[tuple[list[int], float]], shard: int, report: Report
) -> list[Response]:
    generator = _generator(config, target, capacity=config.max_length + 1, seed=config.seed * 1000003 + shard + 1)
    source: Iterator[Row] = (Row(ids, temperature, config.max_length) for ids, temperature in prompts)
    responses, started, num_tokens = [], time.perf_counter(), 0
    for done, row in enumerate(generator.run(source), start=1):
        num_tokens += len(row.answer_ids)
        answer = row.answer_ids[: find_loop(row.answer_ids)]
        if len(answer) >= config.min_answer_length:
            responses.append(Response(row.prompt_ids + answer, len(row.prompt_ids)))
        if done % 512 == 0 or done == len(prompts):
            rate = num_tokens / (time.perf_counter() - started)
            report(f"answers of shard {shard} ({rate:,.0f} tokens/s)", done, len(prompts))
    return responses


def _generator(config: SynthesisConfig, target: LoadedTarget, *, capacity: int, seed: int) -> BulkGenerator:
    eos = target.tokenizer.eos_token_ids or target.decoder.config.eos_token_ids
    return BulkGenerator(target.decoder, num_rows=config.num_rows, capacity=capacity, eos_token_ids=eos, seed=seed)


def _config_dict(config: SynthesisConfig) -> dict[str, object]:
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


def _check_manifest(folder: ResponseFolder, config: SynthesisConfig) -> None:
    """Continue only a run of the same configuration."""
    manifest = folder.read_manifest()
    if manifest is None:
        folder.write_manifest({"config": _config_dict(config), "is_complete": False})
        return
    for key, value in _config_dict(config).items():
        if manifest["config"].get(key) != value:
            raise InputError(
                f"{folder.folder} belongs to another run: {key} is {manifest['config'].get(key)!r} there "
                f"and {value!r} here; choose another --out"
            )
