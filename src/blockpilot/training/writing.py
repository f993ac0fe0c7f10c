"""What the target writes before it answers anything: prompts, as its own user, and materials for tasks."""

import random
import time
from collections.abc import Sequence

from blockpilot.core.errors import InputError
from blockpilot.core.progress import Report
from blockpilot.models.loading import LoadedTarget
from blockpilot.text.repetition import find_loop
from blockpilot.text.tokenizer import Tokenizer
from blockpilot.training.bulk_generation import BulkGenerator, Row
from blockpilot.training.templates import Templates

_REPORT_EVERY = 512
_SHORT = 512  # tokens; of longer texts fewer are written side by side, so that the cache stays as large
_PLACEHOLDER = "\u2063PROMPT\u2063"
_MATERIAL_TEMPERATURE = 0.8
_USES = 4  # how often a text of a material is used, about
_LEAST_TEXTS = 16  # of a material
_LEAST_CHARACTERS = 40
_SENTENCE_ENDS = ".!?\n"


class Writer:
    """The target, finishing many texts side by side."""

    def __init__(self, target: LoadedTarget, num_rows: int, report: Report) -> None:
        self.target, self.num_rows, self.report = target, num_rows, report

    def write(self, rows: Sequence[Row], seed: int, what: str) -> None:
        """Let the target finish all rows; `what` they are is shown, with the tokens per second."""
        started, num_tokens, done = time.perf_counter(), 0, 0
        for most, members in sorted(_by_length(rows).items()):
            generator = BulkGenerator(
                self.target.decoder,
                num_rows=max(1, self.num_rows * _SHORT // max(_SHORT, most)),
                capacity=most + 1,
                eos_token_ids=self.target.eos_token_ids,
                seed=seed + most,
            )
            for row in generator.run(iter(members)):
                done, num_tokens = done + 1, num_tokens + len(row.answer_ids)
                if done % _REPORT_EVERY == 0 or done == len(rows):
                    rate = num_tokens / (time.perf_counter() - started)
                    self.report(f"{what} ({rate:,.0f} tokens/s)", done, len(rows))

    def write_prompts(self, starts: Sequence[str], count: int, *, most: int, seed: int) -> list[str]:
        """The target as its own user: it goes on behind the chat prefix until it ends its turn."""
        tokenizer, prefix = self.target.tokenizer, chat_prefix(self.target.tokenizer)
        encoded = [tokenizer.encode(start) for start in starts]
        for text, ids in zip(starts, encoded, strict=True):
            if len(ids) >= most:
                raise InputError(f"--start {text!r} alone has {len(ids)} tokens of {most}")
        rows = [Row(prefix + encoded[index % len(encoded)], 1.0, len(prefix) + most) for index in range(count)]
        self.write(rows, seed, "writing prompts")
        return [
            tokenizer.decode(row.prompt_ids[len(prefix) :] + row.answer_ids)
            for row in rows
            if row.answer_ids[-1] in self.target.eos_token_ids and len(row.answer_ids) > 3
        ]

    def write_materials(self, templates: Templates, num_tasks: int, *, most: int, seed: int) -> dict[str, list[str]]:
        """Texts of each material that so many tasks need; an unfinished one ends with its last whole sentence."""
        found: dict[str, list[str]] = {}
        for name, need in templates.material_needs(num_tasks).items():
            draw = random.Random(f"{seed}:{name}")
            prompts = [templates.material_prompt(name, draw) for _ in range(_LEAST_TEXTS + round(need / _USES))]
            encoded = self.target.tokenizer.encode_chats([[{"role": "user", "content": text}] for text in prompts])
            length = templates.material_tokens(name)
            rows = [Row(ids, _MATERIAL_TEMPERATURE, min(most, len(ids) + length)) for ids in encoded if len(ids) < most]
            self.write(rows, seed + len(found), f"writing material {name!r}")
            texts = dict.fromkeys(self._whole_text(row) for row in rows)
            found[name] = [text for text in texts if len(text) >= _LEAST_CHARACTERS]
            if not found[name]:
                raise InputError(f"the target writes no {name!r}: none of {len(rows)} texts is long enough to work on")
        return found

    def _whole_text(self, row: Row) -> str:
        kept = row.answer_ids[: find_loop(row.answer_ids)]
        text = self.target.tokenizer.decode(kept)
        if not kept or kept[-1] not in self.target.eos_token_ids:
            text = text[: max(text.rfind(end) for end in _SENTENCE_ENDS) + 1]
        return text.strip()


def _by_length(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """Rows that share a cache, by the most tokens that one of them may have."""
    most = max((row.max_length for row in rows), default=0)
    found: dict[int, list[Row]] = {}
    for row in rows:
        size = _SHORT
        while size < row.max_length:
            size *= 2
        found.setdefault(min(size, most), []).append(row)
    return found


def chat_prefix(tokenizer: Tokenizer) -> list[int]:
    """Token ids of everything the chat template writes before the user's own words."""
    text = tokenizer.apply_chat_template([{"role": "user", "content": _PLACEHOLDER}])
    before, found, _ = text.partition(_PLACEHOLDER)
    if not found or not before:
        raise InputError(
            "the target's chat template writes nothing before the user's words, so it cannot write prompts: "
            "give --num-prompts 0 with --prompts FILE or --tasks N"
        )
    return tokenizer.encode(before)
