"""From updates of the engine to the objects of the protocol, whole or as a stream of chunks."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from blockpilot.core.records import Completion, StepRecord, StepTree, TokenScore, Update
from blockpilot.text.tokenizer import Tokenizer

_REASONS = {"stop": "stop", "length": "length", "abort": "abort", "error": "error"}


@dataclass
class Answer:
    """One call's answer: the same head on every object."""

    model: str
    tokenizer: Tokenizer
    is_chat: bool
    has_timings: bool
    num_choices: int  # of each prompt
    id: str = field(init=False)
    created: int = field(init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        self.created = int(time.time())

    def opening(self, index: int) -> dict[str, Any]:
        """The first chunk of a choice in a chat."""
        return self._object([{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def chunk(self, index: int, update: Update) -> dict[str, Any]:
        reason = None if update.completion is None else _REASONS[update.completion.finish_reason]
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        if self.is_chat:
            choice["delta"] = {"content": update.new_text} if update.new_text or reason is None else {}
        else:
            choice["text"] = update.new_text
        choice["logprobs"] = self._logprobs(update.scores) if update.scores else None
        found = self._object([choice])
        if self.has_timings:
            found["timings"] = {"steps": [self._step(step) for step in update.steps]}
            if update.completion is not None:
                found["timings"] |= _summary(update.completion)
        return found

    def whole(self, completions: Sequence[Completion]) -> dict[str, Any]:
        found = self._object([self._choice(index, one) for index, one in enumerate(completions)], is_whole=True)
        found["usage"] = usage_of(completions, self.num_choices)
        if self.has_timings:
            found["timings"] = [self._timings(one) for one in completions]
        return found

    def _timings(self, completion: Completion) -> dict[str, Any]:
        """Of a whole answer; its first token came with the prompt, each step brought the next ones."""
        tokens = [self._text(token_id) for token_id in completion.token_ids]
        return {"tokens": tokens, "steps": [self._step(step) for step in completion.steps], **_summary(completion)}

    def usage_chunk(self, completions: Sequence[Completion]) -> dict[str, Any]:
        return self._object([]) | {"usage": usage_of(completions, self.num_choices)}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": _REASONS[completion.finish_reason]}
        if self.is_chat:
            choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        else:
            choice["text"] = completion.text
        return choice | {"logprobs": self._logprobs(completion.scores) if completion.scores else None}

    def _object(self, choices: list[dict[str, Any]], *, is_whole: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self.is_chat:
            kind = "chat.completion" if is_whole else "chat.completion.chunk"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any]:
        if self.is_chat:
            return {"content": [self._score(one) for one in scores], "refusal": None}
        return {
            "tokens": [self._text(one.token_id) for one in scores],
            "token_logprobs": [one.log_prob for one in scores],
            "top_logprobs": [{self._text(token_id): value for token_id, value in one.best} for one in scores],
            "text_offset": [],
        }

    def _score(self, one: TokenScore) -> dict[str, Any]:
        best = [self._token(token_id, value) for token_id, value in one.best]
        return self._token(one.token_id, one.log_prob) | {"top_logprobs": best}

    def _token(self, token_id: int, log_prob: float) -> dict[str, Any]:
        text = self._text(token_id)
        return {"token": text, "logprob": log_prob, "bytes": list(text.encode("utf-8"))}

    def _step(self, step: StepRecord) -> dict[str, Any]:
        found = {
            "draft_size": step.block_size,
            "checked": step.verify_size,
            "emitted": step.emitted,
            "draft_ms": round(1e3 * step.draft_seconds, 3),
            "check_ms": round(1e3 * step.verify_seconds, 3),
            "pilot_ms": round(1e3 * step.pilot_seconds, 3),
        }
        return found if step.tree is None else found | {"tree": self._tree(step.tree)}

    def _tree(self, tree: StepTree) -> dict[str, Any]:
        return {
            "tokens": [self._text(token_id) for token_id in tree.token_ids],
            "parents": tree.parents,
            "probabilities": [None if value is None else round(value, 4) for value in tree.probabilities],
            "accepted": tree.path,
            "next": self._text(tree.next_id),
        }

    def _text(self, token_id: int) -> str:
        return self.tokenizer.decode([token_id], skip_special_tokens=False)


def usage_of(completions: Sequence[Completion], num_choices: int) -> dict[str, Any]:
    """A prompt of several choices counts once, as the protocol counts."""
    num_prompt = sum(one.num_prompt_tokens for one in completions[::num_choices])
    num_written = sum(one.num_tokens for one in completions)
    accepted = sum(step.emitted - 1 for one in completions for step in one.steps)
    checked = sum(step.verify_size - 1 for one in completions for step in one.steps)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_written,
        "total_tokens": num_prompt + num_written,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_reused_tokens for one in completions[::num_choices])},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(0, checked - accepted),
        },
    }


def _summary(completion: Completion) -> dict[str, Any]:
    return {
        "prompt_ms": 1e3 * completion.prefill_seconds,
        "decode_ms": 1e3 * completion.decode_seconds,
        "tokens_per_second": completion.tokens_per_second,
        "tau": completion.tau,
        "num_steps": completion.num_steps,
    }
