"""From a call to what the engine is asked. What can be wrong with it is found here, or by the engine before it begins.

Texts that the engine has written keep their tokens: the next turn of a chat begins with the very ids that were
generated, not with what their text would be cut into, so that its beginning is known to the cache. Only where a turn
ends: elsewhere what one client has asked would change how the words of another are cut.
"""

import random
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from blockpilot.core.errors import InputError
from blockpilot.core.guide import Guide
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import MAX_SEED, SamplingParams
from blockpilot.serving.errors import ApiError, bad_request, from_input_error
from blockpilot.serving.protocol import Asked, ChatCall, CompletionCall, Message
from blockpilot.serving.settings import Facts
from blockpilot.serving.wire import Ask
from blockpilot.text.tokenizer import Tokenizer

_MAX_PROMPTS = 64
_REMEMBERED = 256  # texts
_SAME = ("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_WEIGHING = ("step", "chain-step")  # pilots that weigh what steps cost
_PILOTS = ("ar", "auto", *_WEIGHING)


class Preparer:
    def __init__(self, facts: Facts, tokenizer: Tokenizer, *, model_name: str) -> None:
        self.facts, self.tokenizer, self.model_name = facts, tokenizer, model_name
        self._written: OrderedDict[str, tuple[int, ...]] = OrderedDict()  # whole texts and their tokens, latest last
        self._lock = threading.Lock()  # of these
        ends = (tokenizer.decode([end], skip_special_tokens=False) for end in facts.eos_token_ids)
        self._turn_ends = tuple(end for end in ends if end)

    def chat(self, call: ChatCall) -> list[Ask]:
        self.require_model(call.model)
        prompt_ids = self._encode_chat(call.messages)
        wants_scores = bool(call.logprobs)
        if call.top_logprobs is not None and not wants_scores:
            raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
        tokens = call.max_completion_tokens if call.max_completion_tokens is not None else call.max_tokens
        return self._make([prompt_ids], call, tokens, (call.top_logprobs or 0) if wants_scores else None)

    def completion(self, call: CompletionCall) -> list[Ask]:
        self.require_model(call.model)
        prompts = [self._encode(prompt) for prompt in _read_prompts(call.prompt)]
        return self._make(prompts, call, 16 if call.max_tokens is None else call.max_tokens, call.logprobs)

    def remember(self, ask: Ask, completion: Completion) -> None:
        """An answer that the next prompt may begin with."""
        if completion.finish_reason not in ("stop", "length") or ask.params.stop:
            return
        ids = list(completion.token_ids)
        if ids and ids[-1] in self.facts.eos_token_ids:
            ids.pop()
        if not ids:
            return
        whole = (*ask.prompt_ids, *ids)
        text = self.tokenizer.decode(whole, skip_special_tokens=False)
        with self._lock:
            self._written[text] = whole
            self._written.move_to_end(text)
            while len(self._written) > _REMEMBERED:
                self._written.popitem(last=False)

    def require_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            message = f"the model {name[:80]!r} is not served here, {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def encode_text(self, text: str) -> list[int]:
        """As its author wrote it, up to the longest turn that the engine has written itself."""
        with self._lock:
            known = [
                one for one in self._written if text.startswith(one) and text.startswith(self._turn_ends, len(one))
            ]
            longest = max(known, key=len, default="")
            ids = self._written[longest] if longest else ()
        return [*ids, *self.tokenizer.encode(text[len(longest) :])]

    def render_chat(self, messages: Sequence[Message]) -> str:
        try:
            return self.tokenizer.apply_chat_template([message.plain() for message in messages])
        except InputError as error:
            raise bad_request(str(error), "messages") from error

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        return self._encode(self.render_chat(messages))

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        try:
            return self.encode_text(prompt)
        except UnicodeEncodeError as error:
            raise bad_request("the prompt holds half a character", "prompt") from error

    def _make(
        self, prompts: Sequence[list[int]], call: Asked, max_tokens: int | None, logprobs: int | None
    ) -> list[Ask]:
        """As many as there are choices of all prompts; the seeds of choices count on."""
        found = []
        seed = random.SystemRandom().randrange(2**32) if call.seed is None else call.seed % (MAX_SEED + 1)
        try:
            pilot = self._pilot_name(call)
            for prompt_ids in prompts:
                room = max(1, self.facts.context_length - len(prompt_ids))
                count = room if max_tokens is None else max_tokens
                params = self._params(call, count, seed, logprobs)
                for choice in range(call.num_choices):
                    one = params if choice == 0 else self._params(call, count, (seed + choice) % MAX_SEED, logprobs)
                    found.append(Ask(0, prompt_ids, one, pilot))
        except InputError as error:
            raise from_input_error(error) from error
        return found

    def _params(self, call: Asked, max_tokens: int, seed: int, logprobs: int | None) -> SamplingParams:
        given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(call, name)) is not None}
        return SamplingParams(
            max_new_tokens=max_tokens,
            temperature=1.0 if call.temperature is None else call.temperature,
            seed=seed,
            stop=(call.stop,) if isinstance(call.stop, str) else tuple(call.stop or ()),
            stop_token_ids=tuple(call.stop_token_ids or ()),
            ignore_eos=call.ignore_eos,
            logit_bias=tuple(_read_bias(call.logit_bias or {}).items()),
            guide=_read_format(call),
            logprobs=logprobs,
            keeps_trees=call.blockpilot is not None and call.blockpilot.trees,
            **given,
        )

    def _pilot_name(self, call: Asked) -> str:
        """Of names that stand for themselves; a path would let clients read folders. Empty: the server's own."""
        name = call.blockpilot.pilot if call.blockpilot is not None else None
        if name is None:
            return ""
        if name not in _PILOTS and not name.startswith(("fixed:", "tree:")):
            raise bad_request(f"unknown pilot {name[:80]!r}: use {', '.join(_PILOTS)}, fixed:B or tree:N", "blockpilot")
        if name in _WEIGHING and self.facts.drafter is None:
            raise bad_request(f"pilot {name!r} needs a drafter, and none is loaded: use auto or ar", "blockpilot")
        return name


def _read_prompts(value: Any) -> list[str | list[int]]:
    """One text, one list of token ids, or several of either."""
    prompts = [value] if isinstance(value, str) or (isinstance(value, list) and _is_ids(value)) else value
    if not isinstance(prompts, list) or not prompts or len(prompts) > _MAX_PROMPTS:
        raise bad_request(f"prompt must be a text, token ids, or a list of up to {_MAX_PROMPTS} of them", "prompt")
    if not all(isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt)) for prompt in prompts):
        raise bad_request("prompt must hold texts or lists of token ids", "prompt")
    return prompts


def _is_ids(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int for value in values)


def _read_bias(given: dict[str, float]) -> dict[int, float]:
    """The protocol's keys are texts."""
    if not all(key.isascii() and key.isdigit() and len(key) < 10 for key in given):
        raise bad_request("logit_bias must map token ids to numbers", "logit_bias")
    return {int(key): value for key, value in given.items()}


def _read_format(call: Asked) -> Guide | None:
    wanted = call.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return Guide.json()
    if wanted.json_schema is None:
        raise bad_request("response_format of type json_schema needs json_schema", "response_format")
    return Guide.json(wanted.json_schema.schema)
