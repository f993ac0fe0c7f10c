"""What every test gets: few threads, no network, no shared cache."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from blockpilot.core.config import cache_dir

MARKERS = ("real_model: needs the real SmolLM2 file, downloaded if it is not cached", "gpu: needs a GPU", "slow: long")


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)
    torch.set_num_threads(1)  # tests run side by side; tiny models gain nothing from more


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fetched models are the user's. Step costs measured beside other tests are wrong, and must not be remembered."""
    folder, models = tmp_path_factory.mktemp("cache"), cache_dir() / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "models").symlink_to(models)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKPILOT_CACHE", str(folder))
        yield


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that reaches for the network fails; tests on the machine's own sockets go on."""
    if "real_model" in request.keywords:
        yield
        return
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "local"
        if host not in ("local", "localhost", "127.0.0.1", "::1"):
            raise OSError(f"tests may not use the network: {address}")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", guarded)
    yield


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of this test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("BLOCKPILOT_CACHE", str(folder))
    return folder
