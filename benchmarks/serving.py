"""What serving costs, and what it gains, on this machine: the default pair behind `blockpilot serve`.

    python benchmarks/serving.py --out serving.json
    python benchmarks/serving.py --parts engine,turns --num-prompts 4 --json

engine      One client that streams, against `LLM.stream` in a process without a server: the same prompts, one after the
            other, in turns. `overhead` is the share of the engine's tokens per second that the server loses (median of
            pairs, with the 95 % interval of a bootstrap over prompts); `ttft_ms_more` is how much later the first text
            comes. All of a stream counts: HTTP, JSON, the client's own work, all on the same processors.
turns       The second turn of a chat with a history of `--history` tokens: time to the first text where the server has
            read that history before (`warm_ms`), and where it has not (`cold_ms`: the same words behind another
            beginning).
neighbours  Tokens per second of three plain greedy requests beside a fourth one that asks for more: a JSON schema,
            penalties, a bias, min_p, log-probabilities; `ratio` is over three beside a fourth plain one.
clients     As many clients as there are slots, each sending its next request when it has its answer, against
            `LLM.generate` with the same prompts, in turns: `ratio` is the server's tokens per second over the engine's.
load        `blockpilot load-test` at rates from idle to saturation, pilot by pilot: goodput is requests per second that
            keep both limits.

Tables go to standard output; with `--json` the whole result does, which `--out` writes in any case. A machine that does
other work at the same time gives other numbers: the manifest has its load.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from serving_sites import EngineSite, Reply, ServerSite

from blockpilot import __version__
from blockpilot.bench.manifest import git_commit
from blockpilot.cli.console import print_columns
from blockpilot.cli.options import read_list
from blockpilot.core.config import cpu_name
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.files import write_text
from blockpilot.loadtest.config import Limits, Load, read_rate
from blockpilot.loadtest.prompts import Prompt, read_sources
from blockpilot.loadtest.session import LoadTest
from blockpilot.loadtest.statistics import summarize

PARTS = ("engine", "turns", "neighbours", "clients", "load")
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 500}
SPECIAL: dict[str, dict[str, Any]] = {
    "plain": {},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "numbers", "schema": SCHEMA}}},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias": {"logit_bias": {str(token_id): 1.0 for token_id in range(100, 200)}},
    "min_p": {"min_p": 0.1, "temperature": 0.8},
    "logprobs": {"logprobs": True, "top_logprobs": 5},
}
PILOTS = ("ar", "auto")
LOAD_PILOTS = ("auto", "ar", "fixed:8")
_RESAMPLES = 2000
Row = dict[str, Any]


def main() -> int:
    arguments = read_arguments()
    prompts = [str(prompt.messages[0]["content"]) for prompt in read_sources(arguments.prompts)]
    random.Random(arguments.seed).shuffle(prompts)
    manifest = describe_run(arguments)
    result: dict[str, Any] = {"manifest": manifest}
    with ServerSite(model_options(arguments), arguments.slots) as server:
        manifest["server"] = {key: value for key, value in server.facts.items() if key != "chat_template"}
        for part in arguments.parts:
            say(f"{part}: measuring")
            if part == "engine":
                result[part] = list(measure_engine(server, prompts, arguments))
            elif part == "turns":
                result[part] = [measure_turns(server, prompts, arguments)]
            elif part == "neighbours":
                result[part] = list(measure_neighbours(server, prompts, arguments))
            elif part == "clients":
                result[part] = list(measure_clients(server, arguments))
            else:
                result[part] = list(measure_loads(server, arguments))
            if not arguments.json:
                print(f"\n{part}")
                print_rows(result[part])
    manifest["load_at_end"] = os.getloadavg()
    text = json.dumps(result, indent=1) + "\n"
    if arguments.out is not None:
        write_text(arguments.out, text)
    if arguments.json:
        sys.stdout.write(text)
    return 0


def measure_engine(server: ServerSite, prompts: Sequence[str], arguments: argparse.Namespace) -> Iterator[Row]:
    """Pairs of replies to the same prompt; who begins changes from prompt to prompt."""
    with EngineSite(model_options(arguments), arguments.slots) as engine:
        for pilot in PILOTS:
            pairs: list[tuple[Reply, Reply]] = []
            for place in range(arguments.num_prompts + 1):
                text = f"{pilot}: {prompts[place % len(prompts)]}"  # nobody has read its beginning before
                sides = [server, engine] if place % 2 else [engine, server]
                found = {type(side): side.ask(text, arguments.max_new_tokens, pilot) for side in sides}
                if place:  # the first pair warms up
                    pairs.append((found[ServerSite], found[EngineSite]))
            overheads = [1 - over_http.rate / bare.rate for over_http, bare in pairs]
            later = [1e3 * (over_http.ttft - bare.ttft) for over_http, bare in pairs]
            yield {
                "pilot": pilot,
                "server_tokens_per_second": statistics.median(one.rate for one, _ in pairs),
                "engine_tokens_per_second": statistics.median(other.rate for _, other in pairs),
                "overhead": statistics.median(overheads),
                "overhead_interval": interval(overheads),
                "server_ttft_ms": 1e3 * statistics.median(one.ttft for one, _ in pairs),
                "engine_ttft_ms": 1e3 * statistics.median(other.ttft for _, other in pairs),
                "ttft_ms_more": statistics.median(later),
                "ttft_ms_more_interval": interval(later),
                "num_prompts": len(pairs),
            }


def measure_turns(server: ServerSite, prompts: Sequence[str], arguments: argparse.Namespace) -> Row:
    """Warm and cold second turns, in turns."""
    warm, cold = [], []
    for number in range(arguments.repeats + 1):
        source = random.Random(number)
        history = cut_to_tokens(server, source.sample(list(prompts), min(40, len(prompts))), arguments.history)
        first = [{"role": "user", "content": f"Chat {number}. {history}"}]
        answer = server.run(server.write(first, 16))
        more = [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what follows from that?"}]
        known = server.run(server.call([*first, *more], 4))
        unknown = [{"role": "user", "content": f"Other {number}. {history}"}]
        fresh = server.run(server.call([*unknown, *more], 4))
        if number:  # the first pair warms up
            warm.append(1e3 * known.ttft)
            cold.append(1e3 * fresh.ttft)
    ratios = [known / fresh for known, fresh in zip(warm, cold, strict=True)]
    return {
        "history_tokens": arguments.history,
        "warm_ms": statistics.median(warm),
        "cold_ms": statistics.median(cold),
        "ratio": statistics.median(ratios),
        "ratio_interval": interval(ratios),
        "num_chats": len(ratios),
    }


def cut_to_tokens(server: ServerSite, texts: Sequence[str], num_tokens: int) -> str:
    """Words of these texts that have about so many tokens."""
    words = " ".join(texts).split()
    low, high = 0, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        if server.run(count_tokens(server, " ".join(words[:middle]))) <= num_tokens:
            low = middle
        else:
            high = middle - 1
    return " ".join(words[:low])


async def count_tokens(server: ServerSite, text: str) -> int:
    async with server.session.post(f"{server.config.url}/tokenize", data=json.dumps({"prompt": text})) as response:
        return int((await response.json())["count"])


def measure_neighbours(server: ServerSite, prompts: Sequence[str], arguments: argparse.Namespace) -> Iterator[Row]:
    """Rounds of all kinds in an order shuffled anew: three neighbours are timed, the fourth outlives them."""
    for pilot in PILOTS:
        rates: dict[str, list[float]] = {name: [] for name in SPECIAL}
        for number in range(arguments.repeats + 1):
            for name in random.Random(number).sample(list(SPECIAL), len(SPECIAL)):
                rate = server.run(time_neighbours(server, prompts[number * 4 :] or prompts, name, pilot, arguments))
                if number:
                    rates[name].append(rate)
        for name, found in rates.items():
            ratios = [one / plain for one, plain in zip(found, rates["plain"], strict=True)]
            yield {
                "pilot": pilot,
                "beside": name,
                "neighbours_tokens_per_second": statistics.median(found),
                "ratio": statistics.median(ratios),
                "ratio_interval": interval(ratios),
                "num_rounds": len(found),
            }


async def time_neighbours(
    server: ServerSite, prompts: Sequence[str], name: str, pilot: str, arguments: argparse.Namespace
) -> float:
    """Tokens per second of all three together."""

    def ask(place: int, max_tokens: int, extra: dict[str, Any]) -> Any:
        text = "List many numbers." if place == 3 else prompts[place % len(prompts)]
        return server.call(
            [{"role": "user", "content": text}],
            max_tokens,
            **{"blockpilot": {"pilot": pilot}, "temperature": 0} | extra,
        )

    count = arguments.max_new_tokens
    fourth = asyncio.create_task(ask(3, 8 * count, SPECIAL[name]))
    await asyncio.sleep(0.1)
    replies: list[Reply] = await asyncio.gather(*(ask(place, count, {}) for place in range(3)))
    if fourth.done():
        raise BlockPilotError(f"the fourth request ({name}) ended before its neighbours: raise the context length")
    fourth.cancel()
    await asyncio.wait([fourth])
    return sum(reply.rate for reply in replies)


def measure_clients(server: ServerSite, arguments: argparse.Namespace) -> Iterator[Row]:
    asked: list[Prompt] = read_sources(arguments.prompts)
    with EngineSite(model_options(arguments), arguments.slots) as engine:
        for pilot in PILOTS:
            pairs: list[tuple[float, float]] = []
            for number in range(arguments.repeats + 1):
                drawn = random.Random(number).choices(asked, k=arguments.num_requests)
                texts = [str(prompt.messages[0]["content"]) for prompt in drawn]
                sides = [partial(serve_clients, server, drawn), partial(engine.ask_together, texts)]
                order = (0, 1) if number % 2 else (1, 0)
                rates = {side: sides[side](arguments.max_new_tokens, pilot) for side in order}
                if number:  # the first pair warms up
                    pairs.append((rates[0], rates[1]))
            ratios = [over_http / bare for over_http, bare in pairs]
            yield {
                "pilot": pilot,
                "clients": arguments.slots,
                "server_tokens_per_second": statistics.median(one for one, _ in pairs),
                "engine_tokens_per_second": statistics.median(other for _, other in pairs),
                "ratio": statistics.median(ratios),
                "ratio_interval": interval(ratios),
                "num_rounds": len(pairs),
            }


def serve_clients(server: ServerSite, prompts: list[Prompt], max_tokens: int, pilot: str) -> float:
    """Tokens per second of all answers."""
    config = replace(server.config, max_tokens=max_tokens, extra_body={"blockpilot": {"pilot": pilot}})
    load = Load(concurrency=server.num_slots)
    test = LoadTest(config, [(load, len(prompts))], prompts, num_warmups=1)
    test.run(lambda what, done, total: None, lambda line: None, lambda: None)
    row = summarize(test.runs[0], Limits())
    if row["num_failed"]:
        raise BlockPilotError(f"requests failed: {row['failures']}")
    return float(row["output_tokens_per_second"])


def measure_loads(server: ServerSite, arguments: argparse.Namespace) -> Iterator[Row]:
    """All pilots at a rate before the next rate, in an order shuffled anew."""
    limits = Limits(arguments.ttft_limit, arguments.tpot_limit)
    asked: list[Prompt] = read_sources(arguments.prompts)
    for place, rate in enumerate(arguments.rates):
        pilots = LOAD_PILOTS if server.facts["drafter"] else ("ar",)
        for pilot in random.Random(place).sample(pilots, len(pilots)):
            config = replace(
                server.config,
                max_tokens=arguments.max_new_tokens,
                extra_body={"blockpilot": {"pilot": pilot}},
                seed=arguments.seed,
            )
            test = LoadTest(config, [(Load(rate=rate), arguments.num_requests)], asked, num_warmups=1)
            test.run(lambda what, done, total: None, lambda line: None, lambda: None)
            row = summarize(test.runs[0], limits)
            say(f"load: rate {rate:g}, {pilot}: goodput {row['goodput']:.2f}")
            yield {"pilot": pilot, **row}


def model_options(arguments: argparse.Namespace) -> list[str]:
    return ["--target", arguments.target, "--device", arguments.device]


def interval(values: Sequence[float]) -> list[float] | None:
    """95 % of the bootstrap of the median."""
    if len(values) < 3:
        return None
    drawn = np.random.default_rng(0).choice(np.array(values), size=(_RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975)).tolist()
    return [low, high]


def describe_run(arguments: argparse.Namespace) -> dict[str, Any]:
    given = {name: value for name, value in vars(arguments).items() if name not in ("out", "json")}
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "git_commit": git_commit(),
        "arguments": given | {"rates": ["inf" if rate == float("inf") else rate for rate in arguments.rates]},
        "cpu": cpu_name(),
        "num_processors": os.cpu_count(),
        "load_at_start": os.getloadavg(),
        "versions": {"blockpilot": __version__, "python": platform.python_version(), "torch": torch.__version__},
    }


def print_rows(rows: Sequence[Row]) -> None:
    kept = [name for name, value in rows[0].items() if isinstance(value, float | int | str | list)]
    kept = [
        name for name in kept if name not in ("is_complete", "num_requests", "client_cpu_share", "num_without_usage")
    ]
    print_columns({name: [show(row[name]) for row in rows] for name in kept})


def show(value: Any) -> str:
    if isinstance(value, list):
        return " to ".join(show(one) for one in value)
    return (
        f"{value:,.3g}"
        if isinstance(value, float) and abs(value) < 100
        else f"{value:,.0f}"
        if isinstance(value, float)
        else str("-" if value is None else value)
    )


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What serving costs, and what it gains, on this machine.")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="NAME,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--target", default="smollm2-135m", metavar="MODEL")
    parser.add_argument("--device", default="cpu", metavar="DEVICE")
    parser.add_argument("--prompts", default="gsm8k,humaneval,mt_bench", metavar="NAME,...")
    parser.add_argument("--slots", type=int, default=8, metavar="N")
    parser.add_argument("--num-prompts", type=int, default=24, metavar="N", help="of part engine (default: 24)")
    parser.add_argument(
        "--repeats", type=int, default=9, metavar="N", help="of turns, neighbours and clients (default: 9)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--history", type=int, default=1000, metavar="N", help="tokens of a first turn (default: 1000)")
    parser.add_argument("--rates", default="0.5,1,2,4,8", metavar="R,...", help="requests per second of part load")
    parser.add_argument(
        "--num-requests",
        type=int,
        default=64,
        metavar="N",
        help="of each load, and of each round of clients (default: 64)",
    )
    parser.add_argument("--ttft-limit", type=float, default=1000.0, metavar="MS")
    parser.add_argument("--tpot-limit", type=float, default=20.0, metavar="MS")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the result is written, as JSON")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args()
    given.parts = given.parts.split(",")
    if unknown := [part for part in given.parts if part not in PARTS]:
        parser.error(f"unknown part {unknown[0]!r}: use {', '.join(PARTS)}")
    if min(given.num_prompts, given.repeats, given.num_requests, given.history) < 1 or given.max_new_tokens < 8:
        parser.error("counts must be at least 1, --max-new-tokens at least 8")
    given.rates = read_list(given.rates, "--rates", read_rate, "give requests per second")
    return given


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        sys.exit(f"error: {error}")
