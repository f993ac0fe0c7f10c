"""`blockpilot generate`: one prompt in, one streamed answer out.

Everything that can be wrong with the command line is found before PyTorch is imported and the model is loaded, so that
a typing error costs no waiting.
"""

import argparse
import contextlib
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from blockpilot.cli.console import print_columns, print_json, print_note, show_progress
from blockpilot.cli.interrupts import Interrupts
from blockpilot.cli.prompt import check_text, read_prompt
from blockpilot.core.config import EngineConfig, default_dtype
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from blockpilot.engine.llm import LLM
    from blockpilot.engine.outbox import Update

DEFAULT_TARGET = "smollm2-135m"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="give the prompt to the model without its chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the streamed answer")
    _add_model_arguments(parser.add_argument_group("model"))
    _add_sampling_arguments(parser.add_argument_group("answer"))


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    default = EngineConfig()
    target_help = f"preset, Hugging Face folder, GGUF file or hub id (default: {DEFAULT_TARGET})"
    group.add_argument("--target", default=DEFAULT_TARGET, metavar="MODEL", help=target_help)
    drafter_help = "ngram, none, a shipped drafter's name, or a folder or hub id with a DFlash or EAGLE-3 drafter"
    drafter_help += " (default: auto, the one that ships for the target)"
    group.add_argument("--drafter", default="auto", metavar="MODEL", help=drafter_help)
    pilot_help = "ar, fixed:B (chain, block size B), tree:N or tree:N@B (N nodes, drafted at B), step, chain-step, "
    pilot_help += "prefill:PATH, a pilot folder, or auto (default: auto, what pays on this machine)"
    group.add_argument("--pilot", default="auto", help=pilot_help)
    profile_help = "step costs, written by `blockpilot profile` (default: those of this machine, measured once)"
    group.add_argument("--profile", type=Path, metavar="FILE", help=profile_help)
    group.add_argument("--device", default=default.device, help=f"cpu or cuda (default: {default.device})")
    dtype_help = "float32, bfloat16 or float16 (default: float32 on a CPU, bfloat16 on a GPU)"
    group.add_argument("--dtype", default=None, help=dtype_help)
    context_help = "most tokens of prompt and answer together (default: the model's limit)"
    group.add_argument("--context-length", type=int, metavar="N", help=context_help)


def _add_sampling_arguments(group: argparse._ArgumentGroup) -> None:
    default = SamplingParams()
    limit_help = f"most tokens of the answer (default: {default.max_new_tokens})"
    group.add_argument("--max-new-tokens", type=int, default=default.max_new_tokens, metavar="N", help=limit_help)
    group.add_argument(
        "--temperature", type=float, default=default.temperature, metavar="T", help="0 is greedy (default: 0)"
    )
    top_p_help = "sample from the likeliest tokens that hold this share of probability (default: 1)"
    group.add_argument("--top-p", type=float, default=default.top_p, metavar="P", help=top_p_help)
    top_k_help = "sample from this many of the likeliest tokens; 0 is no limit (default: 0)"
    group.add_argument("--top-k", type=int, default=default.top_k, metavar="N", help=top_k_help)
    stop_help = "end the answer before this text; may be given more than once"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    seed_help = "the same seed gives the same answer under every pilot (default: 0)"
    group.add_argument("--seed", type=int, default=default.seed, metavar="N", help=seed_help)


def run(arguments: argparse.Namespace) -> int:
    params, config = _build_params(arguments), _build_config(arguments)
    drafter = _choose_drafter(arguments.drafter, arguments.target)
    _check_pilot(arguments.pilot, has_drafter=drafter != "none")
    prompt = read_prompt(arguments.prompt)
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.engine.llm import LLM

        llm = LLM(
            arguments.target,
            drafter=drafter,
            pilot=arguments.pilot,
            config=config,
            costs=arguments.profile,
            progress=progress,
        )
    if arguments.json:
        completion = _stream(llm, prompt, params, is_raw=arguments.raw, is_shown=False)
        print_json(_describe(completion, llm, params))
        return 0
    if arguments.drafter == "auto" and drafter == "none" and arguments.pilot == "auto":
        print_note(f"no drafter ships for {arguments.target}: plain decoding (try --drafter ngram)")
    completion = _stream(llm, prompt, params, is_raw=arguments.raw, is_shown=True)
    _print_summary(completion, llm)
    return 0


def _build_params(arguments: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        seed=arguments.seed,
        stop=tuple(check_text(text, "a stop string") for text in arguments.stop),
    )


def _build_config(arguments: argparse.Namespace) -> EngineConfig:
    dtype = arguments.dtype or default_dtype(arguments.device)
    return EngineConfig(device=arguments.device, dtype=dtype, context_length=arguments.context_length, num_slots=1)


def _choose_drafter(spec: str, target: str) -> str:
    from blockpilot.models.shipped import shipped_drafter

    return (shipped_drafter(target) or "none") if spec == "auto" else spec


def _check_pilot(spec: str, *, has_drafter: bool) -> None:
    from blockpilot.pilots.registry import load_pilot

    pilot = load_pilot(spec, has_drafter=has_drafter)
    if pilot.num_candidates and not has_drafter:
        raise InputError(f"pilot {spec!r} needs a drafter: add --drafter ngram, or use --pilot ar")


def _stream(llm: "LLM", prompt: str, params: SamplingParams, *, is_raw: bool, is_shown: bool) -> Completion:
    """Follow the answer to its end. What is shown ends with a line break, also when it is interrupted."""
    last = "\n"
    answer = cast("Generator[Update, None, None]", llm.stream(prompt, params, is_raw=is_raw))
    with contextlib.closing(answer) as updates, Interrupts() as interrupts:
        try:
            for update in updates:
                interrupts.check()
                if is_shown and update.new_text:
                    sys.stdout.write(update.new_text)
                    sys.stdout.flush()
                    last = update.new_text[-1]
                if update.completion is not None:
                    return update.completion
        finally:
            if last != "\n":
                sys.stdout.write("\n")
                sys.stdout.flush()
    raise BlockPilotError("the engine stopped before the answer was finished")


def _describe(completion: Completion, llm: "LLM", params: SamplingParams) -> dict[str, Any]:
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "num_prompt_tokens": completion.num_prompt_tokens,
        "num_tokens": completion.num_tokens,
        "num_steps": completion.num_steps,
        "tau": completion.tau,
        "block_sizes": [step.block_size for step in completion.steps],
        "verify_sizes": [step.verify_size for step in completion.steps],
        "emitted": [step.emitted for step in completion.steps],
        "prefill_seconds": completion.prefill_seconds,
        "decode_seconds": completion.decode_seconds,
        "pilot_seconds": completion.pilot_seconds,
        "tokens_per_second": completion.tokens_per_second,
        "finish_reason": completion.finish_reason,
        "pilot": llm.pilot.name,
        "target": llm.target_name,
        "drafter": llm.drafter.name if llm.drafter else None,
        "device": llm.config.device,
        "dtype": llm.config.dtype,
        "seed": params.seed,
    }


def _print_summary(completion: Completion, llm: "LLM") -> None:
    columns = {
        "tokens": str(completion.num_tokens),
        "steps": str(completion.num_steps),
        "tau": _format_number(completion.tau, 2),
        "tokens/s": _format_number(completion.tokens_per_second, 1),
        "prefill": f"{completion.prefill_seconds:.2f} s",
        "pilot": llm.pilot.name,
        "finished by": completion.finish_reason,
    }
    sys.stderr.write("\n")
    print_columns({heading: [cell] for heading, cell in columns.items()}, to_stderr=True)


def _format_number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
