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

from blockpilot.cli.console import print_columns, print_json, print_note, show_progress, watch_interrupts
from blockpilot.cli.options import add_option, add_target_options, read_engine_config, read_fields
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.records import Completion
from blockpilot.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from blockpilot.core.records import Update
    from blockpilot.engine.llm import LLM

_COUNTED = ("text", "token_ids", "num_prompt_tokens", "num_tokens", "num_steps", "tau")
_TIMED = ("prefill_seconds", "decode_seconds", "pilot_seconds", "tokens_per_second", "finish_reason")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="the prompt; - reads it from standard input")
    parser.add_argument("--raw", action="store_true", help="give the prompt to the model without its chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the streamed answer")
    group = parser.add_argument_group("model")
    drafter_help = "ngram, none, a shipped drafter's name, or a folder or hub id with a DFlash or EAGLE-3 drafter"
    add_target_options(group, drafter_help)
    pilot_help = "ar, fixed:B (chain, block size B), tree:N or tree:N@B (N nodes, drafted at B), step, chain-step, "
    pilot_help += "prefill:PATH, a pilot folder, or auto (default: auto, what pays on this machine)"
    group.add_argument("--pilot", default="auto", help=pilot_help)
    profile_help = "step costs, written by `blockpilot profile` (default: those of this machine, measured once)"
    group.add_argument("--profile", type=Path, metavar="FILE", help=profile_help)
    context_help = "most tokens of prompt and answer together (default: the model's limit)"
    group.add_argument("--context-length", type=int, metavar="N", help=context_help)
    group, default = parser.add_argument_group("answer"), SamplingParams()
    add_option(group, "--max-new-tokens", default.max_new_tokens, "most tokens of the answer")
    add_option(group, "--temperature", default.temperature, "0 is greedy", metavar="T")
    top_p_help = "sample from the likeliest tokens that hold this share of probability"
    add_option(group, "--top-p", default.top_p, top_p_help, metavar="P")
    add_option(group, "--top-k", default.top_k, "sample from this many of the likeliest tokens; 0 is no limit")
    stop_help = "end the answer before this text; may be given more than once"
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop_help)
    add_option(group, "--seed", default.seed, "the same seed gives the same answer under every pilot")


def run(arguments: argparse.Namespace) -> int:
    from blockpilot.pilots.registry import load_pilot

    params = SamplingParams(**read_fields(SamplingParams, arguments) | {"stop": tuple(arguments.stop)})
    config = read_engine_config(arguments, context_length=arguments.context_length, num_slots=1)
    pilot = load_pilot(arguments.pilot, has_drafter=arguments.drafter != "none")
    if pilot.num_candidates and arguments.drafter == "none":
        raise InputError(f"pilot {arguments.pilot!r} needs a drafter: add --drafter ngram, or use --pilot ar")
    prompt = _read_prompt(arguments.prompt)
    with show_progress(f"loading {arguments.target}") as progress:
        from blockpilot.engine.llm import LLM

        llm = LLM(
            arguments.target,
            drafter=arguments.drafter,
            pilot=arguments.pilot,
            config=config,
            costs=arguments.profile,
            progress=progress,
        )
    is_lookup = llm.drafter is not None and llm.drafter.name == "ngram"
    if is_lookup and not arguments.json and arguments.drafter == arguments.pilot == "auto":
        print_note(f"no drafter ships for {arguments.target}: text that repeats is drafted by n-gram lookup")
    completion = _stream(llm, prompt, params, is_raw=arguments.raw, is_shown=not arguments.json)
    if arguments.json:
        print_json(_describe(completion, llm, params))
    else:
        _print_summary(completion, llm)
    return 0


def _read_prompt(argument: str) -> str:
    """The prompt's text. Of standard input, one line ending at the end is dropped: `echo` adds it, nobody means it."""
    if argument != "-":
        prompt = argument
    elif sys.stdin is None:
        raise InputError("the prompt is '-', but standard input is closed: pipe the prompt in or write it out")
    else:
        if sys.stdin.isatty():
            print("type the prompt, then press Ctrl-D on an empty line", file=sys.stderr)
        given = sys.stdin.buffer.read().decode("utf-8", errors="surrogateescape")
        prompt = _check_text(given, "standard input").removesuffix("\n").removesuffix("\r")
    if not prompt.strip():
        raise InputError("the prompt is empty: write something to answer")
    return prompt


def _check_text(text: str, what: str) -> str:
    """Refuse bytes that are no text: Python lets them pass through the command line as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode("utf-8"))
        raise InputError(f"{what} is not valid UTF-8 at byte {offset}: convert it to UTF-8 first") from error
    return text


def _stream(llm: "LLM", prompt: str, params: SamplingParams, *, is_raw: bool, is_shown: bool) -> Completion:
    """Follow the answer to its end. What is shown ends with a line break, also when it is interrupted."""
    last = "\n"
    answer = cast("Generator[Update, None, None]", llm.stream(prompt, params, is_raw=is_raw))
    with contextlib.closing(answer) as updates, watch_interrupts() as check_interrupts:
        try:
            for update in updates:
                check_interrupts()
                if is_shown and update.new_text:
                    last = update.new_text[-1]  # first: an interrupt may come right behind the text
                    sys.stdout.write(update.new_text)
                    sys.stdout.flush()
                if update.completion is not None:
                    return update.completion
        finally:
            if last != "\n":
                sys.stdout.write("\n")
                sys.stdout.flush()
    raise BlockPilotError("the engine stopped before the answer was finished")


def _describe(completion: Completion, llm: "LLM", params: SamplingParams) -> dict[str, Any]:
    return {
        **{name: getattr(completion, name) for name in _COUNTED},
        "block_sizes": [step.block_size for step in completion.steps],
        "verify_sizes": [step.verify_size for step in completion.steps],
        "emitted": [step.emitted for step in completion.steps],
        **{name: getattr(completion, name) for name in _TIMED},
        "pilot": llm.pilot.name,
        "target": llm.target_name,
        "drafter": llm.drafter.name if llm.drafter else None,
        "device": llm.config.device,
        "dtype": llm.config.dtype,
        "exact": llm.is_exact,
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
