"""Makes the prompt subsets that ship inside the package, from the whole sets.

    python recipes/make_prompt_subsets.py --data DIR

`--data` is a folder with the whole sets (`gsm8k_test.jsonl.gz`, ...). Of every set that may be passed on, the first 64
test prompts (MT-Bench has 56) and 16 calibration prompts in the order of `bench/tasks.py` are kept, with what scoring
needs and nothing else. SWE-bench Lite is the exception: its issues are long, so the shortest are kept, and results on
them say nothing about long issues. The same input gives the same bytes.
"""

import argparse
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from blockpilot.bench.tasks import NOT_SHIPPED, SHIPPED, TASKS, sort_prompts
from blockpilot.text.prompts import Prompt, read_prompts

NUM_TEST, NUM_CALIBRATION = 64, 16
META = {  # what is kept of `meta`
    "humaneval": ("prompt", "entry_point", "test"),
    "mbpp": ("test_imports", "test_list"),
    "mt_bench": ("category",),
    "math500": ("subject", "level"),
    "swebench": ("repo",),
}


def choose(name: str, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Some of both splits; the shortest of SWE-bench Lite."""
    ordered = sorted(prompts, key=lambda p: (len(p.text), p.id)) if name == "swebench" else sort_prompts(prompts)
    test = [prompt for prompt in ordered if not prompt.is_calibration][:NUM_TEST]
    return sort_prompts(test + [prompt for prompt in ordered if prompt.is_calibration][:NUM_CALIBRATION])


def record(name: str, prompt: Prompt) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": prompt.id, "task": name, "turns": list(prompt.turns)}
    if prompt.answer is not None:
        fields["answer"] = prompt.answer
    meta = {key: prompt.meta[key] for key in META.get(name, ()) if key in prompt.meta}
    return fields | ({"meta": meta} if meta else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=SHIPPED)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, file in TASKS.items():
        if name in NOT_SHIPPED:
            continue
        chosen = choose(name, read_prompts(arguments.data / f"{file}.jsonl.gz"))
        lines = "".join(json.dumps(record(name, prompt), ensure_ascii=False) + "\n" for prompt in chosen)
        packed = gzip.compress(lines.encode(), compresslevel=9, mtime=0)
        (arguments.out / f"{name}.jsonl.gz").write_bytes(packed)
        num_test = sum(not prompt.is_calibration for prompt in chosen)
        counts = f"{num_test} test, {len(chosen) - num_test} calibration"
        print(f"{name}: {counts}, longest {max(len(p.text) for p in chosen)} characters, {len(packed)} bytes")


if __name__ == "__main__":
    main()
