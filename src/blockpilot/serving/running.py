"""Runs the server until somebody ends it: the engine here, the web side in a process of its own."""

import gc
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from blockpilot.core.errors import BlockPilotError
from blockpilot.core.sampling_params import SamplingParams
from blockpilot.engine.llm import LLM
from blockpilot.serving.engine_side import EngineSide
from blockpilot.serving.settings import ServeConfig

_EXIT_SECONDS = 10


def serve(llm: LLM, config: ServeConfig, listener: socket.socket, announce: Callable[[str], None]) -> None:
    """Answer until SIGTERM or Ctrl-C. Answers in flight are finished first; a second signal ends them at once."""
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    here, there = socket.socketpair()
    with _web_side(there, listener) as process:
        there.close()
        ready = f"open {address} in a browser, or point a client at {address}/v1; Ctrl-C ends"
        side = EngineSide(llm, here, config, when_ready=lambda: announce(ready))
        _warm_up(llm)
        with _draining(side, config.drain_seconds, announce):
            side.run()
            try:
                code = process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                code = None
    if code:
        raise BlockPilotError(f"the web side has ended with code {code}; its own lines above say why")


def _warm_up(llm: LLM) -> None:
    """What is made at first use is made before anybody waits for it; what lives for good is not looked at again.

    With all that PyTorch and Numba have loaded, a whole collection of garbage would hold up everybody for 0.1 s.
    """
    for pilot in ("ar", llm.pilot):
        llm.generate([[0]], SamplingParams(max_new_tokens=8, ignore_eos=True), pilot=pilot)
    gc.collect()
    gc.freeze()


@contextmanager
def _web_side(link: socket.socket, listener: socket.socket) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own: Ctrl-C is for this process, which tells it what to do."""
    passed = (link.fileno(), listener.fileno())
    command = [sys.executable, "-P", "-m", "blockpilot.serving.web", *map(str, passed)]
    process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def _draining(side: EngineSide, seconds: float, announce: Callable[[str], None]) -> Iterator[None]:
    """The first signal lets answers be finished, the second does not.

    A thread hears them: Python runs handlers in the main thread alone, which may be about to wait for a request when
    the signal comes, and would not look before the next one.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard, told = socket.socketpair()
    told.setblocking(False)

    def listen() -> None:
        if heard.recv(1):
            side.drain(seconds)
            if side.is_busy:
                announce(f"finishing answers, at most {seconds:g} s; once more ends them now")
        while heard.recv(1):
            side.drain(0.0)

    listener = threading.Thread(target=listen, name="signals", daemon=True)
    before_fd = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    listener.start()
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before_fd)
        told.close()
        listener.join()
        heard.close()
