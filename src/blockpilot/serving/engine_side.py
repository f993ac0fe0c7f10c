"""The engine's side of the server: one thread takes steps, another makes requests of what the web side asks for.

The web side is a process of its own. It never delays a step: requests come in ready, and updates of a few steps go out
in one message, which a thread writes.
"""

import logging
import socket
import threading
from collections.abc import Callable

from blockpilot.core.errors import InputError, describe_failure
from blockpilot.core.records import Update
from blockpilot.engine.llm import LLM
from blockpilot.engine.sequence import Sequence
from blockpilot.serving.outgoing import Outgoing
from blockpilot.serving.settings import Facts, ServeConfig, TokenizerParts
from blockpilot.serving.wire import Ask, Drain, Dropped, EngineEnd, Hello, Leave, Load, News, Refused, Taken

logger = logging.getLogger(__name__)


class EngineSide:
    def __init__(
        self, llm: LLM, link: socket.socket, config: ServeConfig, when_ready: Callable[[], None] = lambda: None
    ) -> None:
        self.llm, self.engine, self.config, self._when_ready = llm, llm.engine, config, when_ready
        self._wire = EngineEnd(link)
        self._outgoing = Outgoing(config.stream_interval)
        self._inbox: list[Sequence | int] = []  # requests to add, and numbers of those that leave
        self._wake = threading.Condition()
        self._is_over = False  # the web side is gone
        self._inside: set[int] = set()  # numbers of requests in the engine
        self._listener = threading.Thread(target=self._listen, name="from the web side", daemon=True)

    @property
    def is_busy(self) -> bool:
        return self.engine.has_work

    def run(self) -> None:
        """Take steps until the web side is gone."""
        if self.llm.drafter is not None:
            self.llm.costs  # noqa: B018  # measured now, not when a client first names a pilot that weighs them
        self._wire.send(Hello(self.config, read_facts(self.llm)))
        self._listener.start()
        try:
            with self.llm.desk.alone():
                while self._take_in():
                    if self.engine.has_work:
                        self._step()
                for number in self._inside:
                    self.engine.abort(number)
        finally:
            self._wire.close()

    def drain(self, seconds: float) -> None:
        """Have answers in flight finished, at most so long, then end."""
        self._wire.send(Drain(seconds))

    def _take_in(self) -> bool:
        """Who has come and who has left; waits where there is nothing to do. False: it is over."""
        with self._wake:
            while not (self._inbox or self._is_over or self.engine.has_work):
                self._wake.wait()
            inbox, self._inbox = self._inbox, []
        gone: list[Update] = []
        for one in inbox:
            if isinstance(one, Sequence):
                self._inside.add(one.request_id)
                self.engine.add(one)
            elif (completion := self.engine.abort(one)) is not None:
                self._inside.discard(one)
                gone.append(Update(one, "", completion))
        self._report(gone)
        return not self._is_over

    def _step(self) -> None:
        try:
            updates, failure = self.engine.step(), None
        except Exception as error:  # of a whole pass: those in it end, the engine goes on
            logger.exception("a pass failed")
            updates, failure = self.engine.take_updates(), describe_failure("a pass failed", error)
        self._inside.difference_update(update.request_id for update in updates if update.completion is not None)
        self._report(updates)
        if failure is not None:
            self._send_news(self._outgoing.flush())
            dropped = self._inside - {sequence.request_id for sequence in self.engine.scheduler.everyone}
            self._inside -= dropped
            self._outgoing.forget(dropped)
            self._wire.send(Dropped(sorted(dropped), failure))

    def _report(self, updates: list[Update]) -> None:
        if updates:
            self._send_news(self._outgoing.pass_on(updates))

    def _send_news(self, updates: list[Update]) -> None:
        if updates:
            self._wire.send(News(updates, self._load()))

    def _load(self) -> Load:
        scheduler, capacity = self.engine.scheduler, self.llm.config.num_slots * self.engine.context_length
        running = [*scheduler.prefilling, *scheduler.decoding]
        held = sum(sequence.num_prefilled + len(sequence.output_ids) for sequence in running)
        return Load(len(running), len(scheduler.waiting), held / capacity)

    def _listen(self) -> None:
        try:
            for message in self._wire.messages():
                if isinstance(message, Ask):
                    self._receive(message)
                elif isinstance(message, Leave):
                    self._post(message.number)
                else:
                    self._when_ready()
        finally:
            with self._wake:
                self._is_over = True
                self._wake.notify()

    def _receive(self, ask: Ask) -> None:
        try:
            pilot = self.llm.resolve_pilot(ask.pilot) if ask.pilot else self.llm.pilot
            sequence = self.engine.make_request(ask.prompt_ids, ask.params, pilot, number=ask.number)
        except InputError as error:
            self._wire.send(Refused(ask.number, str(error), is_at_fault=True))
        except Exception as error:
            logger.exception("a request could not be made")
            self._wire.send(Refused(ask.number, describe_failure("the request failed", error), is_at_fault=False))
        else:
            self._wire.send(Taken(ask.number))
            self._post(sequence)

    def _post(self, what: Sequence | int) -> None:
        with self._wake:
            self._inbox.append(what)
            self._wake.notify()


def read_facts(llm: LLM) -> Facts:
    tokenizer = llm.tokenizer
    return Facts(
        tokenizer=TokenizerParts(
            backend=tokenizer.backend.to_str(),
            special_tokens=tokenizer.special_tokens,
            chat_template=tokenizer.chat_template,
            eos_token_ids=tokenizer.eos_token_ids,
        ),
        eos_token_ids=tuple(llm.engine.eos_token_ids),
        vocab_size=llm.engine.runner.decoder.config.vocab_size,
        context_length=llm.engine.context_length,
        num_slots=llm.config.num_slots,
        drafter=llm.drafter.name if llm.drafter else None,
        max_block_size=llm.drafter.max_block_size if llm.drafter else None,
        pilot=llm.pilot.name,
        device=llm.device_type,
        dtype=llm.config.dtype,
        is_exact=llm.is_exact,
    )
