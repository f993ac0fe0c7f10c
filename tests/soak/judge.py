"""What the answers must be: those of an engine of our own, asked for one after the other and without drafts."""

from collections.abc import Sequence
from typing import Any

from blockpilot import LLM, SamplingParams
from blockpilot.core.guide import Guide
from blockpilot.core.records import Completion
from tests.soak.asks import CHAT, Ask
from tests.soak.clients import Choice, Reply

_SAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class Judge:
    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    def find_fault(self, ask: Ask, reply: Reply) -> str | None:
        """What is wrong with a finished answer."""
        call = ask.call
        prompt_ids = self._encode(call)
        expected = [self._answer(call, prompt_ids, index) for index in range(call.get("n", 1))]
        if len(reply.choices) != len(expected):
            return f"{len(reply.choices)} choices of {len(expected)}"
        for index, (choice, completion) in enumerate(zip(reply.choices, expected, strict=True)):
            if fault := self._compare(ask, choice, completion):
                return f"choice {index}: {fault}; {reply.usage}"
        written = sum(completion.num_tokens for completion in expected)
        if reply.usage is None or reply.usage["completion_tokens"] != written:
            return f"usage {reply.usage}, {written} tokens were expected"
        if reply.usage["prompt_tokens"] != len(prompt_ids):
            return f"usage {reply.usage}, the prompt has {len(prompt_ids)} tokens"
        return None

    def _encode(self, call: dict[str, Any]) -> list[int]:
        tokenizer = self.llm.tokenizer
        if "messages" in call:
            return tokenizer.encode(tokenizer.apply_chat_template(call["messages"]))
        prompt = call["prompt"]
        return tokenizer.encode(prompt) if isinstance(prompt, str) else prompt

    def _answer(self, call: dict[str, Any], prompt_ids: list[int], index: int) -> Completion:
        stop = call.get("stop", ())
        logprobs = call.get("logprobs")
        params = SamplingParams(
            max_new_tokens=call["max_tokens"],
            seed=call["seed"] + index,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=call.get("ignore_eos", False),
            logit_bias={int(key): value for key, value in call.get("logit_bias", {}).items()},  # type: ignore[arg-type]
            guide=_read_guide(call),
            logprobs=call["top_logprobs"] if logprobs is True else logprobs,
            **{name: call[name] for name in _SAME if name in call},
        )
        return self.llm.generate([prompt_ids], params, pilot="ar")[0]

    def _compare(self, ask: Ask, choice: Choice, expected: Completion) -> str | None:
        if (choice.text, choice.reason) != (expected.text, expected.finish_reason):
            return f"{choice.text!r} ({choice.reason}), expected {expected.text!r} ({expected.finish_reason})"
        found = self._read_scores(ask, choice.logprobs)
        wanted = [(self._text(one.token_id), one.log_prob, self._best(one.best)) for one in expected.scores]
        if found != wanted:
            return f"log-probabilities {found[:3]}, expected {wanted[:3]}"
        return None

    def _read_scores(self, ask: Ask, logprobs: Sequence[dict[str, Any]]) -> list[Any]:
        if ask.path == CHAT:
            content = [one for part in logprobs for one in part["content"]]
            return [
                (one["token"], one["logprob"], {best["token"]: best["logprob"] for best in one["top_logprobs"]})
                for one in content
            ]
        return [
            found
            for part in logprobs
            for found in zip(part["tokens"], part["token_logprobs"], part["top_logprobs"], strict=True)
        ]

    def _best(self, best: Sequence[tuple[int, float]]) -> dict[str, float]:
        return {self._text(token_id): value for token_id, value in best}

    def _text(self, token_id: int) -> str:
        return self.llm.tokenizer.decode([token_id], skip_special_tokens=False)


def _read_guide(call: dict[str, Any]) -> Guide | None:
    wanted = call.get("response_format")
    if wanted is None:
        return None
    return Guide.json() if wanted["type"] == "json_object" else Guide.json(wanted["json_schema"]["schema"])
