"""`blockpilot load-test`: requests at a rate, or from waiting clients, to any OpenAI-compatible server.

What can be wrong with the command line and the prompts is found before the server hears of anything.
"""

import argparse
import importlib.util
import json
import math
import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from blockpilot import __version__
from blockpilot.cli.console import (
    make_table,
    print_json,
    print_note,
    print_table,
    show_counted,
    watch_interrupts,
)
from blockpilot.cli.options import add_option, read_count, read_list
from blockpilot.core.errors import BlockPilotError, InputError, require_at_least, require_at_most
from blockpilot.core.files import ensure_folder, write_text
from blockpilot.core.reading import decode_json
from blockpilot.loadtest.config import ENDPOINTS, CallConfig, Limits, Load, read_rate, read_url
from blockpilot.loadtest.prompts import DEFAULT, Prompt, read_sources, require_texts

if TYPE_CHECKING:
    from blockpilot.loadtest.session import LoadTest

_USUAL_REQUESTS = 64
_REQUESTS_PER_CLIENT = 4
_MOST_LOADS, _MOST_CLIENTS, _MOST_REQUESTS = 64, 4096, 100_000
_LATE_MILLISECONDS = 50.0  # a client that sends later than this measures itself
_BUSY_SHARE = 0.9  # of one processor


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--url", "http://127.0.0.1:8000", "the server, with or without /v1", metavar="URL")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON, with every request")
    parser.add_argument("--json", action="store_true", help="print one JSON object: a row per load")
    group = parser.add_argument_group("load (one of the two; several values are measured one after the other)")
    rate_help = "requests per second, sent at random times whatever the server does; inf: all at once"
    group.add_argument("--rate", metavar="R,...", help=rate_help)
    clients_help = "clients that each send the next request when they have their answer"
    group.add_argument("--concurrency", metavar="N,...", help=clients_help)
    count_help = f"of each load (default: {_USUAL_REQUESTS}, or {_REQUESTS_PER_CLIENT} per client if that is more)"
    group.add_argument("--num-requests", type=int, metavar="N", help=count_help)
    add_option(group, "--warmup", 1, "requests before the first load, not counted")
    group.add_argument("--ttft-limit", type=float, metavar="MS", help="most time to the first text, for goodput")
    group.add_argument("--tpot-limit", type=float, metavar="MS", help="most time per further token, for goodput")
    _add_call_options(parser.add_argument_group("requests"))


def _add_call_options(group: Any) -> None:
    prompts_help = "tasks of `bench`, .txt or .jsonl files with a prompt or messages per line"
    add_option(group, "--prompts", DEFAULT, prompts_help, metavar="NAME,...")
    add_option(group, "--max-tokens", 128, "most tokens of an answer")
    group.add_argument("--ignore-eos", action="store_true", help="all answers have --max-tokens tokens")
    add_option(group, "--temperature", 0.0, "0 is greedy", metavar="T")
    add_option(group, "--seed", 0, "of arrivals, the order of prompts, and sampling")
    group.add_argument("--model", metavar="NAME", help="default: the first one that the server lists")
    key_help = "default: BLOCKPILOT_API_KEY, else OPENAI_API_KEY, else none"
    group.add_argument("--api-key", metavar="KEY", help=key_help)
    add_option(group, "--endpoint", "chat", choices=ENDPOINTS)
    body_help = """further fields of every request, such as '{"top_p": 0.9}'"""
    group.add_argument("--extra-body", metavar="JSON", help=body_help)
    add_option(group, "--timeout", 600.0, "of one answer", metavar="S")


def run(arguments: argparse.Namespace) -> int:
    if importlib.util.find_spec("aiohttp") is None:
        raise InputError("load-test needs the package aiohttp: pip install 'blockpilot[serve]'")
    loads, limits, config = _read_loads(arguments), _read_limits(arguments), _read_config(arguments)
    prompts = read_sources(arguments.prompts)
    if config.endpoint == "completions":
        require_texts(prompts)
    if arguments.out is not None:
        _require_file(arguments.out)
    from blockpilot.loadtest.session import LoadTest

    test = LoadTest(config, loads, prompts, num_warmups=arguments.warmup)
    started = datetime.now().astimezone()
    try:
        with watch_interrupts() as check, show_counted("requests") as report:
            test.run(report, print_note, check)
            check()
    except KeyboardInterrupt:
        if any(one.records for one in test.runs):
            _tell_result(arguments, test, limits, prompts, started)
        raise
    _tell_result(arguments, test, limits, prompts, started)
    if not any(record.is_ok for one in test.runs for record in one.records):
        raise BlockPilotError("no request was answered: nothing was measured")
    return 0


def _read_loads(arguments: argparse.Namespace) -> list[tuple[Load, int]]:
    """Each with its number of requests."""
    require_at_least(arguments, num_requests=1, warmup=0)
    require_at_most(arguments, num_requests=_MOST_REQUESTS, warmup=_MOST_REQUESTS)
    if (arguments.rate is None) == (arguments.concurrency is None):
        raise InputError("give either --rate or --concurrency: what is the load?")
    if arguments.rate is not None:
        advice = "give requests per second from 0.001 to 100000, or inf; several with commas between them"
        loads = [Load(rate=rate) for rate in read_list(arguments.rate, "--rate", read_rate, advice)]
    else:
        advice = f"give numbers of clients from 1 to {_MOST_CLIENTS}, with commas between them"
        counts = read_list(arguments.concurrency, "--concurrency", lambda text: read_count(text, _MOST_CLIENTS), advice)
        loads = [Load(concurrency=count) for count in counts]
    if len(loads) > _MOST_LOADS:
        raise InputError(f"{len(loads):,} loads are too many: give at most {_MOST_LOADS}")
    return [(load, _count_requests(arguments, load)) for load in loads]


def _count_requests(arguments: argparse.Namespace, load: Load) -> int:
    clients = load.concurrency or 0
    if arguments.num_requests is None:
        return max(_USUAL_REQUESTS, _REQUESTS_PER_CLIENT * clients)
    if arguments.num_requests < clients:
        raise InputError(f"--concurrency {clients} is never reached by {arguments.num_requests} requests: send more")
    return int(arguments.num_requests)


def _read_limits(arguments: argparse.Namespace) -> Limits:
    for flag, value in (("--ttft-limit", arguments.ttft_limit), ("--tpot-limit", arguments.tpot_limit)):
        if value is not None and not 0 < value < math.inf:
            raise InputError(f"{flag} must be a number of milliseconds above 0, got {value}")
    return Limits(arguments.ttft_limit, arguments.tpot_limit)


def _read_config(arguments: argparse.Namespace) -> CallConfig:
    require_at_least(arguments, max_tokens=1, seed=0)
    require_at_most(arguments, max_tokens=2**20, seed=2**31)
    for flag, value, least, most in (
        ("--temperature", arguments.temperature, 0, 100),
        ("--timeout", arguments.timeout, 0.001, 86400),
    ):
        if not least <= value <= most:  # a value that is no number is not within
            raise InputError(f"{flag} must be from {least} to {most}, got {value}")
    extra = {} if arguments.extra_body is None else decode_json(arguments.extra_body, dict[str, Any], "--extra-body")
    keys = (arguments.api_key, os.environ.get("BLOCKPILOT_API_KEY"), os.environ.get("OPENAI_API_KEY"))
    return CallConfig(
        url=read_url(arguments.url),
        endpoint=arguments.endpoint,
        model=arguments.model or "",
        api_key=next((key for key in keys if key), None),
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        seed=arguments.seed,
        ignores_eos=arguments.ignore_eos,
        extra_body=extra,
        timeout=arguments.timeout,
    )


def _require_file(out: Path) -> None:
    """Before the load, not after it."""
    if os.path.isdir(out):
        raise InputError(f"--out {out} is a folder: name a file")
    ensure_folder(out.parent)


def _tell_result(
    arguments: argparse.Namespace, test: "LoadTest", limits: Limits, prompts: list[Prompt], started: datetime
) -> None:
    """Written first, shown in any case."""
    from blockpilot.loadtest.statistics import summarize

    rows = [summarize(one, limits) for one in test.runs if one.records]
    result = _describe(arguments, test, prompts, started) | {"loads": rows}
    try:
        if arguments.out is not None:
            records = [[record.as_json(one.began) for record in one.records] for one in test.runs if one.records]
            whole = result | {"loads": [row | {"requests": kept} for row, kept in zip(rows, records, strict=True)]}
            write_text(arguments.out, json.dumps(whole) + "\n")
    finally:
        if arguments.json:
            print_json(result)
        else:
            _print_rows(rows, limits, test.config)
        _print_warnings(rows, test)


def _describe(
    arguments: argparse.Namespace, test: "LoadTest", prompts: list[Prompt], started: datetime
) -> dict[str, Any]:
    config = test.config
    return {
        "version": __version__,
        "started": started.isoformat(timespec="seconds"),
        "url": config.url,
        "endpoint": config.endpoint,
        "model": config.model,
        "prompts": arguments.prompts,
        "num_prompts": len(prompts),
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "seed": config.seed,
        "ignore_eos": config.ignores_eos,
        "extra_body": config.extra_body,
        "timeout_seconds": config.timeout,
        "num_warmups": test.num_warmups,
        "ttft_limit_ms": arguments.ttft_limit,
        "tpot_limit_ms": arguments.tpot_limit,
        "is_complete": len(test.runs) == len(test.loads) and all(one.is_complete for one in test.runs),
    }


def _print_rows(rows: list[dict[str, Any]], limits: Limits, config: CallConfig) -> None:
    """Loads down; columns that nobody needs are left out."""
    has_rates = rows[0]["rate"] is not None
    columns = {
        "\nrate" if has_rates else "\nclients": [_show_load(row) for row in rows],
        "\nok": [str(row["num_ok"]) for row in rows],
        "\nfailed": [str(row["num_failed"]) for row in rows] if any(row["num_failed"] for row in rows) else None,
        "\nreq/s": [_show(row["requests_per_second"]) for row in rows],
        "\ntok/s": [_show(row["output_tokens_per_second"]) for row in rows],
        "tok per\nchunk": [_show(row["tokens_per_chunk"]) for row in rows],
    }
    for name, heading, scale in (
        ("ttft_ms", "TTFT ms", 1),
        ("tpot_ms", "TPOT ms", 1),
        ("gap_ms", "gap ms", 1),
        ("whole_ms", "whole s", 1e-3),
    ):
        columns[f"{heading}\np50   p99"] = _pair_up([row[name] for row in rows], scale)
    if limits.are_given:
        columns["goodput\nreq/s   share"] = [_show_goodput(row) for row in rows]
    table = make_table()
    for heading, cells in columns.items():
        if cells is not None:
            table.add_column(heading, justify="right", no_wrap=True)
    for line in zip(*(cells for cells in columns.values() if cells is not None), strict=True):
        table.add_row(*line)
    print_table(table, f"{config.model} at {config.url}; TTFT: to the first text; TPOT: per token after it")


def _show_load(row: dict[str, Any]) -> str:
    name = f"{row['rate']:g}" if isinstance(row["rate"], float) else str(row["rate"] or row["concurrency"])
    return name if row["is_complete"] else f"{name} (cut short)"


def _pair_up(spreads: list[dict[str, float] | None], scale: float) -> list[str]:
    """p50 and p99 of each load in one column, below each other."""
    pairs = [[_show(None if one is None else scale * one[name]) for name in ("p50", "p99")] for one in spreads]
    width = max(4, *(len(second) for _, second in pairs))
    return [f"{first}  {second:>{width}}" for first, second in pairs]


def _show_goodput(row: dict[str, Any]) -> str:
    share = row["goodput_share"]
    return f"{_show(row['goodput'])}  {'-' if share is None else f'{share:.0%}':>5}"


def _show(value: float | None) -> str:
    """Three digits that count."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _print_warnings(rows: list[dict[str, Any]], test: "LoadTest") -> None:
    for row, one in zip(rows, (one for one in test.runs if one.records), strict=True):
        name = one.load.name
        for kind, count in row["failures"].items():
            found = next(record.failure for record in one.records if record.failure and record.failure.kind == kind)
            print_note(f"{name}: {count} of {len(one.records)} requests failed: {found}")
        delay = row["send_delay_ms"]["p99"]
        if one.load.rate not in (None, math.inf) and delay > _LATE_MILLISECONDS:
            print_note(f"{name}: this client was late, p99 {delay:.0f} ms: the load was not what it should have been")
        if (row["client_cpu_share"] or 0) > _BUSY_SHARE:
            print_note(f"{name}: this client used a whole processor: its own speed is what was measured")
        if row["num_without_usage"]:
            print_note(f"{name}: {row['num_without_usage']} answers came without usage: their chunks count as tokens")
