"""Takes the pictures of the page of `blockpilot serve`: light and dark, a tree, a race, a phone.

    python recipes/screenshots.py --out docs/figures

It starts a server with the default model and looks at it with Chromium (Debian's package `chromium`, the Python package
`playwright`). The figures in the pictures are measured while they are taken, so leave the machine alone meanwhile.
"""

import argparse
import io
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

QUESTION = "Write a Python function that counts the vowels in a string."
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
RACES = 5  # the picture is of the middle one
COLOURS = 128  # of a picture's palette: text stays sharp, files small


class Picture(NamedTuple):
    name: str
    scheme: str
    width: int
    height: int
    pilot: str
    is_race: bool
    step: int | None  # whose tree is open


PICTURES = (
    Picture("page_tree_light", "light", 900, 860, "tree:15", is_race=False, step=10),
    Picture("page_tree_dark", "dark", 900, 860, "tree:15", is_race=False, step=10),
    Picture("page_race", "light", 900, 1010, "auto", is_race=True, step=None),
    Picture("page_phone", "dark", 360, 740, "tree:7", is_race=False, step=4),
)


@contextmanager
def run_server(port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    process = subprocess.Popen([sys.executable, "-m", "blockpilot", "serve", "--port", str(port)])
    try:
        while not is_up(url):
            if process.poll() is not None:
                sys.exit("the server did not start")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health") as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, ConnectionError):
        return False


def choose(browser: Any, url: str, picture: Picture) -> bytes:
    found = sorted(take(browser, url, picture) for _ in range(RACES if picture.is_race else 1))
    return found[len(found) // 2][1]


def take(browser: Any, url: str, picture: Picture) -> tuple[float, bytes]:
    """The picture, and how many times as fast the pilot was in its race."""
    context = browser.new_context(
        viewport={"width": picture.width, "height": picture.height},
        color_scheme=picture.scheme,
        reduced_motion="reduce",  # a race is shown at its end
        device_scale_factor=1.5,
    )
    page = context.new_page()
    page.goto(url)
    page.locator("#about", has_text="default pilot").wait_for()
    page.select_option("#pilot", picture.pilot)
    page.fill("#prompt", QUESTION)
    page.click("#race" if picture.is_race else "#send")
    page.locator("#send", has_text="Send").wait_for()
    if picture.step is not None:
        page.locator(".strip button").nth(picture.step).click()
    else:
        page.evaluate("scrollTo(0, 0)")
    page.wait_for_timeout(1000)
    verdict = page.locator(".verdict").inner_text().split() if picture.is_race else ["", "0"]
    found = float(verdict[1]), bytes(page.screenshot())
    context.close()
    return found


def compress(picture: bytes) -> bytes:
    from PIL import Image

    small = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(small, "PNG", optimize=True)
    return small.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--port", type=int, default=8090)
    parser.add_argument("--only", metavar="NAME", help="pictures whose name holds this")
    arguments = parser.parse_args()
    from playwright.sync_api import sync_playwright

    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        sys.exit("there is no browser: install chromium")
    with run_server(arguments.port) as url, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path)
        take(browser, url, PICTURES[2])  # step costs are measured at the first answer
        for picture in PICTURES:
            if arguments.only is None or arguments.only in picture.name:
                file = arguments.out / f"{picture.name}.png"
                file.write_bytes(compress(choose(browser, url, picture)))
                print(file, file.stat().st_size // 1024, "KB")
        browser.close()


if __name__ == "__main__":
    main()
