"""Runs a program that a model wrote and says whether it came to its end.

The program gets little: a few seconds, some memory, an empty temporary folder, no environment, no children and no
network. The kernel enforces time, memory and, where `unshare` is at hand, that it is alone in namespaces of its own,
which die with it; a hook that Python cannot take off again forbids processes and sockets everywhere. That keeps
accidents in, not attackers: do not score programs that somebody wrote to break out.
"""

import contextlib
import functools
import os
import resource
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

_TIME_LIMIT = 5.0  # seconds
_MEMORY_LIMIT = 1 << 30
_FILE_LIMIT = 1 << 20
_MAX_FILES = 32

_RUNNER = """\
import sys
def _guard(event, arguments, refused=({refused})):
    if event.startswith(refused) or (event == "import" and arguments[0] in ("_posixsubprocess", "ctypes", "_ctypes")):
        raise PermissionError(event + " is not allowed here")
sys.addaudithook(_guard)
with open("program.py", encoding="utf-8") as file:
    source = file.read()
exec(compile(source, "program.py", "exec"), {{"__name__": "__main__"}})
open({mark!r}, "w").close()
"""
_REFUSED = ("os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "subprocess.", "socket.")
_NAMESPACES = ["--user", "--map-root-user", "--net", "--pid", "--fork", "--kill-child"]


def passes(program: str, *, time_limit: float = _TIME_LIMIT) -> bool:
    """Whether the program runs to its last line within its limits."""
    with tempfile.TemporaryDirectory(prefix="blockpilot-program-") as folder:
        mark = Path(folder) / f"done-{secrets.token_hex(8)}"
        runner = Path(folder) / "runner.py"
        runner.write_text(_RUNNER.format(refused=", ".join(map(repr, _REFUSED)), mark=str(mark)), encoding="utf-8")
        (Path(folder) / "program.py").write_text(program, encoding="utf-8", errors="replace")
        _run([sys.executable, "-I", "-B", str(runner)], folder, time_limit)
        return mark.is_file()


def _run(command: list[str], folder: str, time_limit: float) -> None:
    process = subprocess.Popen(
        [*_isolation(), *command],
        cwd=folder,
        env={"HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(_set_limits, time_limit),
    )
    try:
        process.wait(timeout=time_limit)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _set_limits(time_limit: float) -> None:
    limits = {
        resource.RLIMIT_CPU: int(time_limit) + 1,
        resource.RLIMIT_AS: _MEMORY_LIMIT,
        resource.RLIMIT_FSIZE: _FILE_LIMIT,
        resource.RLIMIT_NOFILE: _MAX_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for name, value in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a limit may be lower already
            resource.setrlimit(name, (value, value))


@functools.cache
def _isolation() -> tuple[str, ...]:
    """`unshare` with the namespaces that this machine grants; nothing where it has none."""
    found = shutil.which("unshare")
    if found is None:
        return ()
    words = (found, *_NAMESPACES)
    try:
        tried = subprocess.run([*words, "true"], check=False, capture_output=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ()
    return words if tried.returncode == 0 else ()
