"""Training data without a dataset: the target writes prompts and answers them.

Three phases, all resumable. First the prompts: sampled from the bare chat prefix (everything the template puts before
the user's words), together with any prompt files; deduplicated and written once. Then the materials that tasks are
made of (`templates.py`), written once. Then the answers, shard by shard: greedy for most prompts, sampled for some,
each cut where it starts to repeat itself, because a drafter trained on loops learns to loop. A task's conversation may
go on for some turns; each turn is a text of its own.
"""

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from blockpilot.core.device import is_out_of_memory
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.core.manifests import open_run, write_manifest
from blockpilot.core.progress import Report
from blockpilot.core.reading import Count, read_json
from blockpilot.models.loading import LoadedTarget
from blockpilot.text.chat_template import Message
from blockpilot.text.prompts import read_prompts
from blockpilot.text.repetition import find_loop, without_overlap
from blockpilot.training.bulk_generation import Row
from blockpilot.training.responses import Response, ResponseSet, read_responses, shard_path, write_shard
from blockpilot.training.templates import Templates
from blockpilot.training.writing import Writer

PROMPTS_FILE, MATERIALS_FILE = "prompts.json", "materials.json"
FILES, WRITTEN = "files", "written"  # sources; the others are tasks
_MAX_PROMPT_BYTES = 2**32
_ENOUGH_PROMPTS = 16  # to judge a task by
_ADVICE = "delete it with the shards beside it"


@dataclass(frozen=True, kw_only=True)
class SynthesisConfig:
    target: str
    num_written: int  # prompts the target writes itself (attempts; some are dropped)
    starts: tuple[str, ...] = ("",)  # first words of written prompts, in turn; "" leaves all to the target
    prompt_files: tuple[str, ...] = ()
    excluded_files: tuple[str, ...] = ()  # prompts that share 13 words in a row with one of these are left out
    num_answers: int = 1  # to each prompt of a file; those after the first are sampled
    num_tasks: int = 0  # prompts made from task templates
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.8)  # each prompt draws one of these
    max_length: int = 448  # prompt and answer together
    max_prompt_length: int = 336
    max_answer_length: int = 600  # tasks name their own
    min_answer_length: int = 8
    num_rows: int = 64
    shard_size: int = 16384
    seed: int = 0


def synthesize(
    config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report, templates: Templates | None = None
) -> None:
    """Run all phases into `out`, continuing whatever is there."""
    if target.tokenizer.chat_template is None:
        raise InputError(f"{target.name} has no chat template, so nobody could ask the drafter's target a question")
    try:
        _Synthesis(config, target, out, report, templates if config.num_tasks else None).run()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise BlockPilotError("out of memory: lower --rows and give the same command again to go on") from error


class _Prompts(TypedDict):
    """Token ids of prompts, as they are kept on disk."""

    files: list[list[Count]]
    written: list[list[Count]]


class _Asked(NamedTuple):
    """An answer to be asked for: to a prompt of a file (kind 0), a written one (1), or a task's (2)."""

    kind: int
    number: int
    temperature: float


@dataclass(frozen=True)
class _Job:
    """An answer to be written."""

    place: int  # in its shard
    source: int
    row: Row
    messages: Sequence[Message] = ()  # of a conversation that may go on
    then: tuple[str, ...] = ()  # what the user says next


class _Synthesis:
    def __init__(
        self, config: SynthesisConfig, target: LoadedTarget, out: Path, report: Report, templates: Templates | None
    ) -> None:
        self.config, self.target, self.out, self.templates = config, target, out, templates
        self.tokenizer = target.tokenizer
        self.writer = Writer(target, config.num_rows, report)
        self.sources = [FILES, WRITTEN, *(task.name for task in templates.tasks)] if templates else [FILES, WRITTEN]
        self.identity: dict[str, Any] = {"config": json.loads(json.dumps(asdict(config)))}
        if templates is not None:
            text = json.dumps(templates.as_plain(), sort_keys=True)
            self.identity["templates"] = {"sha256": hashlib.sha256(text.encode()).hexdigest()}

    def run(self) -> None:
        open_run(self.out, self.identity, free=("num_rows",))  # memory may not allow as many rows as before
        prompts = self._load_or_write_prompts(self.out / PROMPTS_FILE)
        materials = self._load_or_write_materials(self.out / MATERIALS_FILE)
        size, asked = self.config.shard_size, self._plan(prompts)
        num_shards = -(-len(asked) // size)
        for index in range(num_shards):
            if not shard_path(self.out, index).is_file():
                jobs = self._jobs(asked[index * size : (index + 1) * size], prompts, materials)
                write_shard(shard_path(self.out, index), self._answer(jobs, index))
        texts = read_responses(self.out)
        if not len(texts):
            least = self.config.min_answer_length
            raise InputError(f"none of {len(asked)} answers has {least} tokens before it repeats")
        counts = {"num_texts": len(texts), "num_answer_tokens": texts.num_answer_tokens, "num_shards": num_shards}
        summary = {"sources": self.sources, "mix": self._mix(texts, asked)}
        write_manifest(self.out, {**self.identity, "is_complete": True, **counts, **summary})

    def _plan(self, prompts: _Prompts) -> list[_Asked]:
        """Everything to be answered, shuffled; the same whenever it is asked for."""
        config, draw = self.config, random.Random(self.config.seed)
        warm = [value for value in config.temperatures if value] or [max(config.temperatures)]
        numbers = {0: range(len(prompts["files"])), 1: range(len(prompts["written"])), 2: range(config.num_tasks)}
        plan = [_Asked(kind, number, draw.choice(config.temperatures)) for kind, of in numbers.items() for number in of]
        plan += [_Asked(0, number, draw.choice(warm)) for _ in range(config.num_answers - 1) for number in numbers[0]]
        draw.shuffle(plan)
        return plan

    def _mix(self, texts: ResponseSet, asked: Sequence[_Asked]) -> list[dict[str, Any]]:
        """What the texts are made of, source by source."""
        asked_of = Counter(
            2 + self.templates.task(self.config.seed, one.number) if one.kind == 2 and self.templates else one.kind
            for one in asked
        )
        answers = texts.lengths - texts.prompt_lengths
        rows = []
        for source, name in enumerate(self.sources):
            own = texts.sources == source
            count = int(own.sum())
            row = {
                "source": name,
                "prompts": asked_of[source],
                "texts": count,
                "answer_tokens": int(answers[own].sum()),
            }
            for column, values in (("mean_prompt", texts.prompt_lengths), ("mean_answer", answers)):
                row[column] = round(float(values[own].float().mean()), 1) if count else 0.0
            rows.append(row)
        return rows

    def _load_or_write_prompts(self, path: Path) -> _Prompts:
        if path.is_file():
            return _load(path, _Prompts)
        config = self.config
        texts = [prompt.text for name in config.prompt_files for prompt in read_prompts(Path(name))]
        written = []
        if config.num_written:
            written = self.writer.write_prompts(
                config.starts, config.num_written, most=config.max_prompt_length, seed=config.seed
            )
        given = _unique(texts)
        kept = {FILES: self._encode(given), WRITTEN: self._encode(_unique(written, given))}
        if not any(kept.values()) and not config.num_tasks:
            count = len(_unique([*texts, *written]))
            raise InputError(f"none of {count} prompts fits into {config.max_prompt_length} tokens: raise --max-length")
        write_text(path, json.dumps(kept, separators=(",", ":")))
        return _Prompts(files=kept[FILES], written=kept[WRITTEN])

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Those that are no test's, and not too long."""
        encoded = self.tokenizer.encode_chats([_ask(text) for text in self._without_excluded(texts)])
        return [ids for ids in encoded if len(ids) <= self.config.max_prompt_length]

    def _load_or_write_materials(self, path: Path) -> dict[str, list[str]]:
        if self.templates is None:
            return {}
        if path.is_file():
            return _load(path, dict[str, list[str]])
        config = self.config
        written = self.writer.write_materials(
            self.templates, config.num_tasks, most=config.max_length, seed=config.seed
        )
        kept = {name: self._without_excluded(texts) for name, texts in written.items()}
        if empty := next((name for name, texts in kept.items() if not texts), None):
            raise InputError(f"all texts of material {empty!r} share words with an excluded prompt")
        write_text(path, json.dumps(kept, ensure_ascii=False, separators=(",", ":")))
        return kept

    def _without_excluded(self, texts: Sequence[str]) -> list[str]:
        excluded = [prompt.text for name in self.config.excluded_files for prompt in read_prompts(Path(name))]
        return without_overlap(texts, excluded)

    def _jobs(self, asked: Sequence[_Asked], prompts: _Prompts, materials: Mapping[str, Sequence[str]]) -> list[_Job]:
        """Of a shard, in its order. Tasks whose prompts are too long are left out."""
        config, jobs, tasks = self.config, [], []
        for place, one in enumerate(asked):
            if one.kind == 2:
                tasks.append(place)
                continue
            ids = prompts["written" if one.kind else "files"][one.number]
            most = min(config.max_length, len(ids) + config.max_answer_length)
            jobs.append(_Job(place, one.kind, Row(ids, one.temperature, most)))
        if tasks and self.templates is not None:
            jobs += self._task_jobs({place: asked[place] for place in tasks}, self.templates, materials)
        return sorted(jobs, key=lambda job: job.place)

    def _task_jobs(
        self, asked: Mapping[int, _Asked], templates: Templates, materials: Mapping[str, Sequence[str]]
    ) -> Iterator[_Job]:
        """By their places in the shard. What is too long is tried again with half as many pieces."""
        left, pieces = list(asked), max(task.pieces[1] for task in templates.tasks)
        while left and pieces:
            made = [
                templates.prompt(self.config.seed, asked[place].number, materials, most_pieces=pieces) for place in left
            ]
            encoded = self.tokenizer.encode_chats([_ask(prompt.text) for prompt in made])
            too_long = []
            for place, prompt, ids in zip(left, made, encoded, strict=True):
                if len(ids) > self.config.max_prompt_length:
                    too_long.append(place)
                    continue
                row = Row(ids, asked[place].temperature, self._most_tokens(prompt.task, ids))
                yield _Job(place, 2 + prompt.task, row, _ask(prompt.text), prompt.then)
            left, pieces = too_long, pieces // 2

    def _most_tokens(self, task: int, ids: Sequence[int]) -> int:
        assert self.templates is not None
        return min(self.config.max_length, len(ids) + self.templates.tasks[task].tokens)

    def _answer(self, jobs: list[_Job], shard: int) -> Iterator[Response]:
        """Answers in the order of their prompts: rows finish short ones first, and held-out texts are the last ones."""
        found: dict[int, list[Response]] = {job.place: [] for job in jobs}
        turn = 0
        while jobs:
            seed = self.config.seed * 1000003 + shard + 1 + turn * 2**40
            what = f"answers of shard {shard}" + (f", turn {turn + 1}" if turn else "")
            self.writer.write([job.row for job in jobs], seed, what)
            whole = []  # answers that a conversation can go on from
            for job in jobs:
                row = job.row
                answer = row.answer_ids[: find_loop(row.answer_ids)]
                if len(answer) >= self.config.min_answer_length:
                    found[job.place].append(Response(row.prompt_ids + answer, len(row.prompt_ids), job.source))
                    if job.then and answer[-1] in self.target.eos_token_ids:
                        whole.append((job, self.tokenizer.decode(answer)))
            jobs, turn = self._next_turns(whole), turn + 1
        for responses in found.values():
            yield from responses

    def _next_turns(self, whole: Sequence[tuple[_Job, str]]) -> list[_Job]:
        chats = [[*job.messages, {"role": "assistant", "content": answer}, *_ask(job.then[0])] for job, answer in whole]
        jobs = []
        for (job, _), chat, ids in zip(whole, chats, self.tokenizer.encode_chats(chats), strict=True):
            if len(ids) <= self.config.max_prompt_length:
                row = Row(ids, job.row.temperature, self._most_tokens(job.source - 2, ids))
                jobs.append(_Job(job.place, job.source, row, chat, job.then[1:]))
        return jobs


def _unique(texts: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """Without blanks around them, doubles, and those that are known."""
    found, left_out = dict.fromkeys(text.strip() for text in texts), {"", *known}
    return [text for text in found if text not in left_out]


def _ask(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def _load(path: Path, kind: Any) -> Any:
    return read_json(path, kind, _ADVICE, most=_MAX_PROMPT_BYTES)


def tasks_that_failed(mix: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sources that gave nearly no text: the target's answers are too short, or repeat themselves at once."""
    return [row["source"] for row in mix if row["prompts"] >= _ENOUGH_PROMPTS and row["texts"] < row["prompts"] / 10]
