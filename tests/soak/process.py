"""The processes of a soak test: the server, and who watches it."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60


@dataclass(frozen=True)
class Use:
    """What the engine's process and that of the web side hold."""

    megabytes: float
    num_threads: int
    num_files: int


@dataclass
class Watch:
    """Milliseconds that /health took, and that the watch itself woke up too late."""

    answers: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)


class ServerProcess:
    def __init__(self, key: str = "") -> None:
        self.port, self._key = _find_port(), key
        self.url = f"http://127.0.0.1:{self.port}"
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.server", str(self.port), key],
            cwd=_ROOT,
            env=_environment(),
            stderr=self._errors,
        )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                self.get("/health")
                return
            except OSError as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"the server does not start: {self.errors}") from error
                time.sleep(0.05)

    def get(self, path: str) -> str:
        return self._call(path, None)

    def post(self, path: str, body: dict[str, Any]) -> str:
        return self._call(path, json.dumps(body).encode())

    def _call(self, path: str, body: bytes | None) -> str:
        request = urllib.request.Request(self.url + path, body, {"Authorization": f"Bearer {self._key}"})
        with urllib.request.urlopen(request, timeout=30) as response:
            return str(response.read().decode())

    def gauge(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))

    def use(self) -> Use:
        folder = Path(f"/proc/{self._process.pid}")
        children = (folder / f"task/{self._process.pid}/children").read_text().split()
        folders = [folder, *(Path(f"/proc/{child}") for child in children)]
        pages = sum(int((one / "statm").read_text().split()[1]) for one in folders)
        return Use(
            round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            sum(len(os.listdir(one / "task")) for one in folders),
            sum(len(os.listdir(one / "fd")) for one in folders),
        )

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, seconds: float) -> int:
        return self._process.wait(seconds)

    @property
    def errors(self) -> str:
        """What it has written to standard error."""
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace")

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._errors.close()


@contextmanager
def running_server(key: str = "") -> Iterator[ServerProcess]:
    server = ServerProcess(key)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


@contextmanager
def watching(server: ServerProcess) -> Iterator[Watch]:
    """What is found is there at the end."""
    command = [sys.executable, "-m", "tests.soak.watch", str(server.port)]
    found = Watch()
    process = subprocess.Popen(
        command, cwd=_ROOT, env=_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        yield found
        shown, error = process.communicate(timeout=60)
        if process.returncode:
            raise RuntimeError(f"/health was not answered: {error.decode()[-500:]}")
        found.answers, found.late = json.loads(shown)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(_ROOT / "src"), str(_ROOT)])}


def _find_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
