"""One answer per task, token by token, so that a report can show its blocks without a tokenizer."""

from collections.abc import Sequence
from typing import Any

from blockpilot.bench.answers import Answer
from blockpilot.bench.tasks import TaskPrompts
from blockpilot.text.detokenizer import IncrementalDetokenizer
from blockpilot.text.tokenizer import Tokenizer

MAX_PROMPT_CHARACTERS = 2000


def pick_samples(answers: Sequence[Answer], tasks: Sequence[TaskPrompts], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The first prompt's first answer of every task, with the steps of every method that wrote the same tokens."""
    samples = []
    for task in tasks:
        prompt = task.prompts[0]
        found = [a for a in answers if (a.task, a.prompt_id, a.turn, a.repeat) == (task.name, prompt.id, 0, 0)]
        plain = next((answer for answer in found if answer.method == "ar"), None)
        if plain is None:
            continue
        same = [answer for answer in found if answer.token_ids == plain.token_ids]
        samples.append(
            {
                "task": task.name,
                "prompt_id": prompt.id,
                "prompt": prompt.text[:MAX_PROMPT_CHARACTERS],
                "pieces": split_text(plain.token_ids, tokenizer),
                "steps": {answer.method: _steps(answer) for answer in same},
            }
        )
    return samples


def split_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """What every token adds to the text; a character spread over several tokens comes with the last of them."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    return pieces


def _steps(answer: Answer) -> dict[str, list[int]]:
    return {"block_sizes": answer.block_sizes, "verify_sizes": answer.verify_sizes, "emitted": answer.emitted}
