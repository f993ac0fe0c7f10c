"""Asking vLLM: the prompts of these tests, and a script that answers them in a process of its own.

    python answering.py TARGET DRAFTER [--plain] [--version VERSION]

The last line printed is a JSON list of token ids per prompt.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

NUM_TOKENS = 40
LONG = "Here is a list of animals and what they eat. " + " ".join(
    f"Number {index}: the {animal} eats {food}."
    for index, (animal, food) in enumerate(
        [("cat", "fish"), ("cow", "grass"), ("bear", "honey"), ("mouse", "cheese"), ("panda", "bamboo")] * 3
    )
)
PROMPTS = [
    "What is the capital of France?",
    "Write a Python function that tests whether a number is prime.",
    "List five uses of a paperclip.",
    LONG + " What does the panda eat?",  # some 200 tokens: read in pieces
    "What is 17 * 23? Show your steps.",
    "Repeat the word 'banana' ten times.",
]


def make_llm(target: Path, drafter: Path | None, **options: Any) -> Any:
    from vllm import LLM

    if drafter is not None:
        options["speculative_config"] = {"method": "dflash", "model": str(drafter), "num_speculative_tokens": 15}
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "distributed_executor_backend": "uni",
        "max_model_len": 512,
        "max_num_seqs": 4,
        "block_size": 32,
        "disable_log_stats": False,
    }
    return LLM(str(target), **settings | options)


def make_params(override: str | None = None, **options: Any) -> Any:
    from vllm import SamplingParams

    extra = None if override is None else {"blockpilot": override}
    return SamplingParams(**{"temperature": 0, "max_tokens": NUM_TOKENS, "extra_args": extra} | options)


def ask(llm: Any, prompts: list[str], overrides: list[str | None] | str | None = None, **options: Any) -> list[Any]:
    """vLLM's outputs, one per prompt. Overrides are one each or one for all."""
    given = overrides if isinstance(overrides, list) else [overrides] * len(prompts)
    chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
    return llm.chat(chats, [make_params(override, **options) for override in given], use_tqdm=False)


def token_ids(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--version")
    parser.add_argument("--num-prompts", type=int, default=len(PROMPTS))
    arguments = parser.parse_args()
    if arguments.version:
        import vllm.version

        vllm.version.__version__ = arguments.version
    llm = make_llm(arguments.target, None if arguments.plain else arguments.drafter)
    answers = token_ids(ask(llm, PROMPTS[: arguments.num_prompts]))
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


if __name__ == "__main__":
    main()
