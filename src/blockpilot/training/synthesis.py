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

from blockpilot.core.device import is_out_of_memory
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.core.manifests import open_run, write_manifest
from blockpilot.core.progress import Report
from blockpilot.core.reading import Count, read_json
from blockpilot.models.loading import LoadedTarget
from blockpilot.text.prompts import read_prompts
from blockpilot.text.repetition import find_loop, without_overlap
from blockpilot.text.tokenizer import Tokenizer
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.responses import Response, read_responses, shard_path, write_shard

PROMPTS_FILE = "prompts.json"
_REPORT_EVERY = 512
_MAX_PROMPT_BYTES = 2**32
_PLACEHOLDER = "\u2063PROMPT\u2063"


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


def synthesize(config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report) -> None:
    """Run both phases into `out`, continuing whatever is there."""
    if target.tokenizer.chat_template is None:
        raise InputError(f"{target.name} has no chat template, so nobody could ask the drafter's target a question")
    try:
        _Synthesis(config, target, out, report).run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise BlockPilotError("out of memory: lower --rows and give the same command again to go on") from error


class _Synthesis:
    def __init__(self, config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report) -> None:
        self.config, self.target, self.out, self.report = config, target, out, report
        self.tokenizer = target.tokenizer
        self.identity = {"config": json.loads(json.dumps(asdict(config)))}

    def run(self) -> None:
        open_run(self.out, self.identity, free=("num_rows",))  # memory may not allow as many rows as before
        prompts, size = self._load_or_write_prompts(self.out / PROMPTS_FILE), self.config.shard_size
        temperatures = random.Random(self.config.seed).choices(self.config.temperatures, k=len(prompts))
        num_shards = -(-len(prompts) // size)
        for index in range(num_shards):
            path, share = shard_path(self.out, index), slice(index * size, (index + 1) * size)
            if not path.is_file():
                pairs = zip(prompts[share], temperatures[share], strict=True)
                rows = [Row(ids, temperature, self.config.max_length) for ids, temperature in pairs]
                write_shard(path, self._answer(rows, index))
        texts = read_responses(self.out)
        counts = {"num_texts": len(texts), "num_answer_tokens": texts.num_answer_tokens, "num_shards": num_shards}
        write_manifest(self.out, {**self.identity, "is_complete": True, **counts})

    def _load_or_write_prompts(self, path: Path) -> list[list[int]]:
        if path.is_file():
            return _load_prompts(path)
        config = self.config
        texts = [prompt.text for name in config.prompt_files for prompt in read_prompts(Path(name))]
        if config.num_written:
            texts += self._write_prompts()
        unique = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
        excluded = [prompt.text for name in config.excluded_files for prompt in read_prompts(Path(name))]
        unique = without_overlap(unique, excluded)
        encoded = [self.tokenizer.encode_chat(text) for text in unique]
        kept = [ids for ids in encoded if len(ids) <= config.max_prompt_length]
        if not kept:
            raise InputError(
                f"none of {len(unique)} prompts fits into {config.max_prompt_length} tokens: raise --max-length"
            )
        random.Random(config.seed).shuffle(kept)
        write_text(path, json.dumps(kept, separators=(",", ":")))
        return kept

    def _write_prompts(self) -> list[str]:
        """The target as its own user: it goes on behind the chat prefix until it ends its turn."""
        config, prefix = self.config, chat_prefix(self.tokenizer)
        starts = [self.tokenizer.encode(start) for start in config.starts]
        for text, ids in zip(config.starts, starts, strict=True):
            if len(ids) >= config.max_prompt_length:
                raise InputError(f"--start {text!r} alone has {len(ids)} tokens of {config.max_prompt_length}")
        limit = len(prefix) + config.max_prompt_length
        rows = [Row(prefix + starts[index % len(starts)], 1.0, limit) for index in range(config.num_written)]
        self._write(rows, limit, config.seed, lambda rate: "writing prompts")
        return [
            self.tokenizer.decode(row.prompt_ids[len(prefix) :] + row.answer_ids)
            for row in rows
            if row.answer_ids[-1] in self.target.eos_token_ids and len(row.answer_ids) > 3
        ]

    def _answer(self, rows: list[Row], shard: int) -> Iterator[Response]:
        """Answers in the order of their prompts: rows finish short ones first, and held-out texts are the last ones."""
        seed = self.config.seed * 1000003 + shard + 1
        self._write(rows, self.config.max_length, seed, lambda rate: f"answers of shard {shard} ({rate:,.0f} tokens/s)")
        for row in rows:
            answer = row.answer_ids[: find_loop(row.answer_ids)]
            if len(answer) >= self.config.min_answer_length:
                yield Response(row.prompt_ids + answer, len(row.prompt_ids))

    def _write(self, rows: list[Row], max_length: int, seed: int, describe: Callable[[float], str]) -> None:
        """Let the target finish all rows; `describe` tells what they are, given the tokens per second."""
        generator = BulkGenerator(
            self.target.decoder,
            num_rows=self.config.num_rows,
            capacity=max_length + 1,
            eos_token_ids=self.target.eos_token_ids,
            seed=seed,
        )
        started, num_tokens = time.perf_counter(), 0
        for done, row in enumerate(generator.run(iter(rows)), start=1):
            num_tokens += len(row.answer_ids)
            if done % _REPORT_EVERY == 0 or done == len(rows):
                self.report(describe(num_tokens / (time.perf_counter() - started)), done, len(rows))


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


def _load_prompts(path: Path) -> list[list[int]]:
    advice = "delete it with the shards beside it"
    found: list[list[int]] = read_json(path, list[list[Count]], advice, most=_MAX_PROMPT_BYTES)
    return found
