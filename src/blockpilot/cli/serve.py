"""`blockpilot serve`: an OpenAI-compatible server, and a page to try it."""

import argparse
import importlib.util
import os
from pathlib import Path

from blockpilot.cli.console import print_note, show_progress
from blockpilot.cli.options import add_option, add_target_options, read_engine_config
from blockpilot.core.errors import InputError, require_at_least, require_at_most
from blockpilot.serving.listening import bind
from blockpilot.serving.settings import ServeConfig

_NEEDED = ("starlette", "uvicorn", "prometheus_client")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_options(parser, "ngram, none, a shipped drafter's name, or a folder or hub id")
    group = parser.add_argument_group("engine")
    pilot_help = "of requests that name none: ar, fixed:B, tree:N, step, chain-step, a pilot folder, or auto"
    add_option(group, "--pilot", "auto", pilot_help, metavar="PILOT")
    group.add_argument("--profile", type=Path, metavar="FILE", help="step costs, written by `blockpilot profile`")
    add_option(group, "--slots", 8, "requests answered at once")
    context_help = "most tokens of prompt and answer together (default: the model's limit)"
    group.add_argument("--context-length", type=int, metavar="N", help=context_help)
    group = parser.add_argument_group("server")
    add_option(group, "--host", "127.0.0.1", "0.0.0.0 lets other machines in: set a key then", metavar="HOST")
    add_option(group, "--port", 8000, "0 takes any that is free")
    key_help = "clients must send it as a bearer token (default: BLOCKPILOT_API_KEY, else none)"
    group.add_argument("--api-key", metavar="KEY", help=key_help)
    group.add_argument("--model-name", metavar="NAME", help="what clients call the model (default: the target's name)")
    add_option(group, "--max-queue", 256, "requests that may wait for a slot; more are told to try again")
    add_option(group, "--max-seconds", 600.0, "of one call", metavar="S")
    add_option(group, "--drain-seconds", 60.0, "for answers in flight when the server is told to end", metavar="S")
    interval_help = "milliseconds between two pieces of a stream, which hold all steps since the last; 0: one per step"
    add_option(group, "--stream-interval", 30.0, interval_help, metavar="MS")
    origin_help = "let browsers call from pages of this origin; repeatable (default: from none)"
    group.add_argument("--allow-origin", action="append", default=[], metavar="ORIGIN", help=origin_help)


def run(arguments: argparse.Namespace) -> int:
    if missing := [name for name in _NEEDED if importlib.util.find_spec(name) is None]:
        raise InputError(f"serve needs the package {missing[0]}: pip install 'blockpilot[serve]'")
    require_at_least(arguments, slots=1, max_queue=0, port=0, max_seconds=1, drain_seconds=0, stream_interval=0)
    require_at_most(arguments, slots=1024, max_queue=2**16, port=65535, max_seconds=86400, drain_seconds=86400)
    require_at_most(arguments, stream_interval=10000)
    engine_config = read_engine_config(
        arguments, num_slots=arguments.slots, context_length=arguments.context_length, reuses_prefixes=True
    )
    key = arguments.api_key or os.environ.get("BLOCKPILOT_API_KEY") or None
    if key is not None and not (key.isascii() and key.isprintable() and key.strip() == key):
        raise InputError("--api-key must be printable ASCII without spaces around it: HTTP headers carry nothing else")
    is_local = arguments.host in ("127.0.0.1", "localhost", "::1")
    config = ServeConfig(
        model_name=arguments.model_name or Path(arguments.target).name,
        api_key=key,
        max_queue=arguments.max_queue,
        max_seconds=arguments.max_seconds,
        drain_seconds=arguments.drain_seconds,
        stream_interval=arguments.stream_interval / 1e3,
        is_local=is_local,
        origins=tuple(arguments.allow_origin),
    )
    with bind(arguments.host, arguments.port) as listener:
        with show_progress(f"loading {arguments.target}") as progress:
            from blockpilot.engine.llm import LLM

            llm = LLM(
                arguments.target,
                drafter=arguments.drafter,
                pilot=arguments.pilot,
                config=engine_config,
                costs=arguments.profile,
                progress=progress,
            )
        from blockpilot.serving.running import serve

        if not is_local and key is None:
            print_note("anybody who reaches this address may use the server: set --api-key")
        serve(llm, config, listener, print_note)
    return 0
