"""The command line's frame: lazy imports, one-line errors, exit codes."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from blockpilot import __version__
from blockpilot.cli import main as cli
from blockpilot.core.errors import BlockPilotError, InputError


@pytest.fixture
def failing_verb(monkeypatch):
    """Makes `blockpilot models list` raise what the test puts into it."""
    raised: list[BaseException] = []

    def run(arguments):
        raise raised[0]

    monkeypatch.setattr("blockpilot.cli.models.run", run)
    return raised


def test_parsing_imports_neither_torch_nor_rich():
    code = (
        "import sys; from blockpilot.cli.main import build_parser\n"
        "build_parser(['generate', 'models'])\n"
        "sys.exit(','.join({'torch', 'rich', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stderr.strip() == ""
    )


def test_version_and_help(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"blockpilot {__version__}\n"
    assert cli.main(["--help"]) == 0
    output = capsys.readouterr().out
    assert all(verb in output for verb in cli.VERBS)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb, capsys):
    assert cli.main([verb, "--help"]) == 0
    assert f"usage: blockpilot {verb}" in capsys.readouterr().out


@pytest.mark.parametrize("words", [[], ["fly"], ["generate"], ["models"], ["models", "fetch"], ["--bogus"]])
def test_bad_command_lines_give_one_line_and_2(words, capsys):
    assert cli.main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("blockpilot: error: ")
    assert output.err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (InputError("no such thing: take another"), 2, "blockpilot: error: no such thing: take another\n"),
        (BlockPilotError("the download\nfailed"), 1, "blockpilot: error: the download failed\n"),
        (
            OSError(28, "No space left on device", "out.json"),
            1,
            "blockpilot: error: No space left on device: out.json\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_foreseen_errors(failing_verb, capsys, error, exit_code, line):
    failing_verb.append(error)
    assert cli.main(["models", "list"]) == exit_code
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", line)


def test_unforeseen_error_points_to_debug(failing_verb, capsys):
    failing_verb.append(ZeroDivisionError("oops"))
    assert cli.main(["models", "list"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("blockpilot: error: unexpected ZeroDivisionError: oops")
    assert "--debug" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("words", [["--debug", "models", "list"], ["models", "list", "--debug"]])
def test_debug_shows_the_traceback(failing_verb, capsys, words):
    failing_verb.append(InputError("wrong"))
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.endswith("blockpilot: error: wrong\n")


def test_debug_before_the_verb_survives_the_verbs_parser():
    words = ["--debug", "models", "list"]
    assert cli.build_parser(words).parse_args(words).debug


def test_closed_pipe_is_silent(failing_verb, capsys, monkeypatch):
    monkeypatch.setattr(cli, "_silence_stdout", lambda: None)
    failing_verb.append(BrokenPipeError())
    assert cli.main(["models", "list"]) == 141
    assert capsys.readouterr().err == ""


def test_closed_pipe_for_real():
    """The reader is gone before anything is written; neither the flush nor the exit may complain."""
    script = f"{sys.executable} -m blockpilot generate --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode in (0, 141)
    assert done.stderr == ""


def test_streams_that_cannot_be_reconfigured_are_left_alone(monkeypatch):
    monkeypatch.setattr(cli, "sys", SimpleNamespace(stdout=object(), stderr=object()))
    cli._allow_any_character()
