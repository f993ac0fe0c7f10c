"""A whole load test: is the server there, what is its model, does it take our calls; then load after load."""

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import aiohttp

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.core.progress import Progress, Report
from blockpilot.loadtest import prompts as prompting
from blockpilot.loadtest.client import list_models, open_session, send
from blockpilot.loadtest.config import CallConfig, Load
from blockpilot.loadtest.driver import Run, drive
from blockpilot.loadtest.prompts import Prompt
from blockpilot.loadtest.records import Failure, Record

Tell = Callable[[str], None]
_PASSING = ("http 408", "http 429")  # refusals that may be none a moment later


class LoadTest:
    """Its `runs` hold what was measured so far, also after an interruption."""

    def __init__(
        self, config: CallConfig, loads: Sequence[tuple[Load, int]], prompts: Sequence[Prompt], *, num_warmups: int
    ) -> None:
        self.config, self.loads, self.prompts, self.num_warmups = config, loads, prompts, num_warmups
        self.runs: list[Run] = []

    def run(self, report: Report, tell: Tell, check: Callable[[], None]) -> None:
        """`check` raises where somebody wants to stop."""
        num_asked = self.num_warmups + sum(count for _, count in self.loads)
        if num_asked > len(self.prompts):
            tell(
                f"{num_asked:,} requests of {len(self.prompts):,} prompts: some are asked again, and a server that "
                "keeps the beginnings of prompts answers those sooner"
            )
        _allow_connections()
        asyncio.run(self._run(report, tell, check))

    async def _run(self, report: Report, tell: Tell, check: Callable[[], None]) -> None:
        drawn = prompting.draw(self.prompts, self.config.seed)
        async with open_session(self.config) as session:
            self.config = await _settle_model(session, self.config, tell)
            await self._warm_up(session, drawn, tell)
            progress = Progress(report, sum(count for _, count in self.loads))
            for load, count in self.loads:
                run = Run(load, count)
                self.runs.append(run)
                await self._drive(run, session, list(itertools.islice(drawn, count)), progress, check)

    async def _drive(
        self,
        run: Run,
        session: aiohttp.ClientSession,
        prompts: Sequence[Prompt],
        progress: Progress,
        check: Callable[[], None],
    ) -> None:
        async def ask(prompt: Prompt, number: int, planned: float) -> Record:
            return await send(session, self.config, prompt, number=number, planned=planned)

        def note(record: Record) -> None:
            check()
            progress.advance(run.load.name)

        await drive(run, prompts, ask, note, seed=self.config.seed)

    async def _warm_up(self, session: aiohttp.ClientSession, drawn: Iterator[Prompt], tell: Tell) -> None:
        """The first request tells whether the server takes such calls at all."""
        for number in range(self.num_warmups):
            record = await send(session, self.config, next(drawn), number=number, planned=0.0)
            if record.failure is None:
                continue
            if number == 0 and _is_refusal(record.failure):
                raise InputError(f"{self.config.call_url} refuses the first request ({record.failure})")
            tell(f"a warm-up request failed ({record.failure})")


async def _settle_model(session: aiohttp.ClientSession, config: CallConfig, tell: Tell) -> CallConfig:
    found = await list_models(session, config)
    if config.model:
        return config
    if isinstance(found, Failure):
        kind = InputError if _is_refusal(found) else BlockPilotError
        raise kind(f"{config.models_url} does not name a model ({found}): give its name with --model")
    if not found:
        raise BlockPilotError(f"{config.models_url} names no model: give a name with --model")
    if len(found) > 1:
        tell(f"the server has {len(found)} models: {found[0]} is measured; --model takes another")
    return dataclasses.replace(config, model=found[0])


def _is_refusal(failure: Failure) -> bool:
    return failure.kind.startswith("http 4") and failure.kind not in _PASSING


def _allow_connections() -> None:
    """As many open files as the system lets us have: each request in flight is one."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
