"""The `blockpilot` command: finds the verb, runs it, and turns every failure into one line and an exit code.

A verb is a module with `add_arguments(parser)` and `run(arguments) -> exit code`. It is imported only when its name
stands on the command line, and imports heavy packages only when it runs: `blockpilot --help` stays instant.
"""

import argparse
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from blockpilot import __version__
from blockpilot.cli.console import Terminated, heed_terminations
from blockpilot.core.errors import BlockPilotError, InputError

VERBS = {  # verb: (module, what `blockpilot --help` says)
    "generate": ("blockpilot.cli.generate", "answer a prompt, streamed as it is written"),
    "serve": ("blockpilot.cli.serve", "answer OpenAI clients over HTTP, with a page that shows every step"),
    "load-test": ("blockpilot.cli.load_test", "measure any OpenAI-compatible server under load"),
    "profile": ("blockpilot.cli.profile", "measure what drafts and checks cost on this machine"),
    "synthesize": ("blockpilot.cli.synthesize", "let the target write its own training text"),
    "train-drafter": ("blockpilot.cli.train_drafter", "train a drafter (DFlash, DFlash 2 or EAGLE-3) for any target"),
    "collect": ("blockpilot.cli.collect", "replay prompts and record what every block size would emit"),
    "train-pilot": ("blockpilot.cli.train_pilot", "fit a pilot to traces and show what it gains"),
    "bench": ("blockpilot.cli.bench", "measure methods on tasks: speedup, tau, losslessness"),
    "report": ("blockpilot.cli.report", "turn results of bench into Markdown, HTML and figures"),
    "probe": ("blockpilot.cli.probe", "show that logits are the same bits in trees, chains, batches and cut prompts"),
    "models": ("blockpilot.cli.models", "list, fetch, verify and export models"),
}
_EXIT_FAILURE = 1
_EXIT_BAD_INPUT = 2
_EXIT_INTERRUPTED = 130  # 128 + SIGINT, what shells expect
_EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
_EXIT_TERMINATED = 143  # 128 + SIGTERM
_BAD_NAMES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM)
_MAX_LINE = 2000  # characters


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        _print_error(f"{message} (see {self.prog} --help)")
        sys.exit(_EXIT_BAD_INPUT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    _allow_any_character()
    try:
        with heed_terminations():
            _check_words(words)
            arguments = build_parser(words).parse_args(words)
            exit_code = importlib.import_module(VERBS[arguments.verb][0]).run(arguments)
            sys.stdout.flush()  # here, where a closed pipe can still be handled
            return int(exit_code)
    except SystemExit as request:  # argparse: --help, --version and errors
        return request.code if isinstance(request.code, int) else _EXIT_FAILURE
    except BrokenPipeError:
        _silence_stdout()
        return _EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        if "--debug" in words:
            traceback.print_exc()
        return _report(error)


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for this command line: verbs that do not stand on it are only named, not imported."""
    summary = "Lossless speculative decoding: a drafter proposes blocks, the target checks them."
    parser = _Parser(prog="blockpilot", description=summary, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"blockpilot {__version__}")
    debug_help = "show the traceback of an error"
    parser.add_argument("--debug", action="store_true", help=debug_help)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True, title="verbs")
    for name, (module, purpose) in VERBS.items():
        verb = verbs.add_parser(
            name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.", allow_abbrev=False
        )
        if name in words:
            importlib.import_module(module).add_arguments(verb)
            # it may stand before or after the verb; SUPPRESS keeps the second parser from undoing the first
            verb.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=debug_help)
    return parser


def _report(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        is_terminated = isinstance(error, Terminated)
        print("terminated" if is_terminated else "interrupted", file=sys.stderr)
        return _EXIT_TERMINATED if is_terminated else _EXIT_INTERRUPTED
    if isinstance(error, BlockPilotError):
        _print_error(str(error))
        return error.exit_code
    if isinstance(error, OSError) and error.strerror:
        _print_error(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
        _silence_stdout()  # a full disk behind standard output would fail again at exit
        return _EXIT_BAD_INPUT if error.errno in _BAD_NAMES else _EXIT_FAILURE
    if isinstance(error, MemoryError):
        _print_error("out of memory: close other programs, or use a smaller model or shorter input")
        return _EXIT_FAILURE
    _print_error(f"unexpected {type(error).__name__}: {error} (run again with --debug to see where)")
    return _EXIT_FAILURE


def _print_error(message: str) -> None:
    line = " ".join(message.split())
    line = "".join(mark if mark.isprintable() else "?" for mark in line)  # a name may hold what moves the cursor
    print("blockpilot: error:", line if len(line) <= _MAX_LINE else f"{line[:_MAX_LINE]}...", file=sys.stderr)


def _check_words(words: Sequence[str]) -> None:
    """Bytes that are no text pass through the command line as lone surrogates, and fail wherever they are written.
    Of `--option=--` argparse makes an empty list, whatever the option's type is."""
    for word in words:
        if word.startswith("--") and word.endswith("=--"):
            raise InputError(f"{word[:80]!r} gives no value: write one behind the =")
        try:
            word.encode("utf-8")
        except UnicodeEncodeError as error:
            offset = len(word[: error.start].encode("utf-8"))
            shown = word.encode("utf-8", errors="replace")[:80].decode("utf-8", errors="replace")
            raise InputError(
                f"the argument {shown!r} is not valid UTF-8 at byte {offset}: convert it, or rename the file"
            ) from error


def _allow_any_character() -> None:
    """A terminal that cannot show a character of the answer gets a question mark, not a crash."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Nobody reads standard output any more: let Python's own flush at exit go nowhere."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):
        return  # standard output is no real file
