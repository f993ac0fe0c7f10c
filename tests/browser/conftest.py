"""A server with the default model in a process of its own, and a browser that looks at its page."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 120  # the first start may fetch the model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "browser":
            item.add_marker(pytest.mark.real_model)


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=60) as response:
        return json.load(response)


def is_up(url: str) -> bool:
    try:
        return bool(ask(f"{url}/health")["status"] == "ok")
    except (urllib.error.URLError, ConnectionError):
        return False


@contextmanager
def run_server(*options: str) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "blockpilot", "serve", "--port", str(port), *options]
    process, url = subprocess.Popen(command, env=os.environ), f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_up(url):
            assert process.poll() is None and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")  # a driver that is open has an event loop, which no other test may meet
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="no browser tests: the package playwright is missing")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no browser tests: install chromium")
    with api.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=path)
        yield found
        found.close()


@pytest.fixture(scope="module")
def server(browser: Any) -> Iterator[str]:
    """After the browser: where there is none, none is started."""
    with run_server() as url:
        yield url


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page of its own; what goes wrong in it ends up in `page.faults`, its requests in `page.urls`."""
    contexts = []

    def open_one(url: str, *, width: int = 1000, height: int = 800, **settings: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}, **settings))
        page = contexts[-1].new_page()
        page.set_default_timeout(20_000)
        page.faults, page.urls = [], []
        page.on("console", lambda message: message.type == "error" and page.faults.append(message.text))
        page.on("pageerror", lambda error: page.faults.append(str(error)))
        page.on("request", lambda request: page.urls.append(request.url))
        page.goto(url)
        page.locator("#about", has_text="pilot").or_(page.locator("#error:visible")).first.wait_for()
        return page

    yield open_one
    for context in contexts:
        context.close()
