"""How fast the engine runs on this CPU, on the real default model. Prints one JSON object.

    python benchmarks/cpu_step.py --threads 2 --tokens 64 --repeats 5
    python benchmarks/cpu_step.py --dtype float32

What the numbers mean:

plain       Plain autoregressive decoding, the baseline of every speedup that we report. `ours` and `transformers` are
            tokens per second after the first token (prefill excluded) on the same prompt, with the same threads. The
            two run in turn, A B A B, so that a machine that slows down slows both; medians are compared. `ratio` is
            ours / transformers. `same_tokens` says whether both wrote the same text. `transformers` computes in
            float32. So with `--dtype float32` the texts must be the same: if not, compare nothing. In int8, the usual
            precision of this model, activations are rounded, a near-tie may fall the other way, and what follows is
            another text: `equal_share` is the share of tokens before the first one that differs.
verify      Milliseconds of one target pass over a block of 1, 2, 4 ... tokens behind a context of 256, head and argmax
            included. Speculative decoding pays where this curve is flat: `ratio_16_to_1` is the price of checking 15
            drafted tokens, in plain steps. An ideal machine, bound by reading its weights, would show 1.
machine     What was measured on. Numbers from different machines, or from a machine that was busy, do not compare.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from blockpilot import LLM, EngineConfig, SamplingParams
from blockpilot.core.config import DTYPES, cpu_name
from blockpilot.core.tree import DraftTree
from blockpilot.models.export import export_target

TARGET = "smollm2-135m"
PROMPT = "Explain in three sentences why the sky is blue."
CONTEXT = 256
VERIFY_SIZES = (1, 2, 4, 8, 16, 32)
PASSES_PER_REPEAT = 4


class FirstTokenClock:
    """A `transformers` streamer that notes when each token came; the first call carries the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass

    @property
    def decode_seconds(self) -> float:
        """From the first answer token to the last."""
        return self.times[-1] - self.times[1]


def measure_plain(llm: LLM, *, num_tokens: int, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    prompt_ids = llm.tokenizer.encode_chat(PROMPT)
    reference = load_transformers()
    rates: dict[str, list[float]] = {"ours": [], "transformers": []}
    answers: dict[str, list[int]] = {}
    for repeat in range(repeats + 1):  # the first round warms up
        for name in rates:
            run = run_ours if name == "ours" else run_transformers
            answers[name], rate = run(llm if name == "ours" else reference, prompt_ids, num_tokens)
            if repeat:
                rates[name].append(rate)
                say(f"plain {name}: {rate:.1f} tokens/s")
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return {
        **{name: round(value, 2) for name, value in medians.items()},
        "ratio": round(medians["ours"] / medians["transformers"], 3),
        "same_tokens": answers["ours"] == answers["transformers"],
        "equal_share": round(equal_share(answers["ours"], answers["transformers"]), 3),
        "num_tokens": num_tokens,
        "runs": {name: [round(value, 2) for value in values] for name, values in rates.items()},
    }


def equal_share(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Of two texts of the same length: the share of tokens before the first one that differs."""
    differing = (place for place, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1])
    return next(differing, len(ours)) / len(ours)


def run_ours(llm: LLM, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    params = SamplingParams(max_new_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    completion = llm.generate([prompt_ids], params, pilot="ar")[0]
    seconds = time.perf_counter() - started - completion.prefill_seconds  # all overhead counts, as for transformers
    return completion.token_ids, (num_tokens - 1) / seconds


def run_transformers(model: Any, prompt_ids: list[int], num_tokens: int) -> tuple[list[int], float]:
    clock = FirstTokenClock()
    ids = torch.tensor([prompt_ids])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        eos_token_id=None,
        pad_token_id=0,
        streamer=clock,
    )
    return out[0, len(prompt_ids) :].tolist(), (num_tokens - 1) / clock.decode_seconds


def load_transformers() -> Any:
    """The same weights as `transformers` loads them from our export."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        exported = export_target(TARGET, Path(folder) / "target")
        return AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()


def measure_verify(llm: LLM, *, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    runner = llm.engine.runner
    ids = (llm.tokenizer.encode_chat(PROMPT) * CONTEXT)[: CONTEXT + max(VERIFY_SIZES)]
    greedy = [SamplingParams()]  # as the engine asks: in int8 a pass that is told so finds the tokens by itself
    slot = runner.cache.reserve()
    try:
        runner.prefill([(slot, ids[:CONTEXT])], ())
        seconds: dict[int, list[float]] = {size: [] for size in VERIFY_SIZES}
        for repeat in range(PASSES_PER_REPEAT * repeats + 1):  # the first round warms up
            for size in VERIFY_SIZES:
                tree = DraftTree.chain(ids[CONTEXT], ids[CONTEXT + 1 : CONTEXT + size])
                started = time.perf_counter()
                runner.verify([(slot, tree)], (), greedy).best_ids()  # nothing kept: rows are overwritten
                if repeat:
                    seconds[size].append(time.perf_counter() - started)
    finally:
        runner.cache.free(slot)
    medians = {size: 1000 * statistics.median(values) for size, values in seconds.items()}
    for size, milliseconds in medians.items():
        say(f"verify {size:2d} tokens: {milliseconds:.1f} ms")
    return {
        "context": CONTEXT,
        "milliseconds": {str(size): round(value, 3) for size, value in medians.items()},
        "ratio_16_to_1": round(medians[16] / medians[1], 3),
        "num_passes": PASSES_PER_REPEAT * repeats,
    }


def describe_machine(llm: LLM) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "target": TARGET,
        "dtype": llm.config.dtype,
        "linear_backend": llm.linear_backend,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure plain decoding and verify steps on this CPU.")
    parser.add_argument("--threads", type=int, default=2, help="threads for both engines (default 2)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per plain answer, at least 2 (default 64)")
    parser.add_argument("--repeats", type=int, default=5, help="measured rounds after one that warms up (default 5)")
    dtype_help = "of our engine; auto: int8 where this machine has kernels for it (default auto)"
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help=dtype_help)
    parser.add_argument("--json-only", action="store_true", help="no progress on standard error")
    arguments = parser.parse_args()
    if arguments.threads < 1 or arguments.tokens < 2 or arguments.repeats < 1:
        parser.error("--threads and --repeats must be at least 1, --tokens at least 2")
    return arguments


def main() -> None:
    arguments = parse_arguments()

    def say(line: str) -> None:
        if not arguments.json_only:
            print(line, file=sys.stderr, flush=True)

    torch.set_num_threads(arguments.threads)
    context_length = 2 * CONTEXT + arguments.tokens
    llm = LLM(TARGET, config=EngineConfig(dtype=arguments.dtype, num_slots=1, context_length=context_length))
    say("each line is one measurement; close other programs for numbers that mean something")
    plain = measure_plain(llm, num_tokens=arguments.tokens, repeats=arguments.repeats, say=say)
    verify = measure_verify(llm, repeats=arguments.repeats, say=say)
    print(json.dumps({"plain": plain, "verify": verify, "machine": describe_machine(llm)}, indent=2))


if __name__ == "__main__":
    main()
