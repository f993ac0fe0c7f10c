"""Where the prompt comes from: the command line, or standard input when it is `-`."""

import sys

from blockpilot.core.errors import InputError


def read_prompt(argument: str) -> str:
    """The prompt's text. Of standard input, one line ending at the end is dropped: `echo` adds it, nobody means it."""
    if argument == "-":
        prompt = _read_standard_input().removesuffix("\n").removesuffix("\r")
    else:
        prompt = check_text(argument, "the prompt")
    if not prompt.strip():
        raise InputError("the prompt is empty: write something to answer")
    return prompt


def check_text(text: str, what: str) -> str:
    """Python lets bytes that are no text pass through the command line as lone surrogates; refuse them by name."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        offset = len(text[: error.start].encode("utf-8"))
        raise InputError(f"{what} is not valid UTF-8 at byte {offset}: convert it to UTF-8 first") from error
    return text


def _read_standard_input() -> str:
    if sys.stdin is None:
        raise InputError("the prompt is '-', but standard input is closed: pipe the prompt in or write it out")
    if sys.stdin.isatty():
        print("type the prompt, then press Ctrl-D on an empty line", file=sys.stderr)
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"standard input is not valid UTF-8 at byte {error.start}: convert it to UTF-8 first"
        ) from error
