"""The page of `blockpilot serve` in a real browser, with the real default model."""

import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import ask, run_server

QUESTION = "Write a Python function that counts the vowels in a string."
Open = Callable[..., Any]


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Playwright's own waiting evaluates text, which the page's policy forbids."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def finish(page: Any) -> None:
    wait_until(lambda: page.locator("#send").inner_text() == "Send", "the answer did not end")


def set_tokens(page: Any, count: int) -> None:
    page.locator("summary").click()
    page.fill("#tokens", str(count))
    page.locator("summary").click()


def answer(page: Any, text: str = QUESTION, *, button: str = "#send") -> None:
    page.fill("#prompt", text)
    page.click(button)
    finish(page)


def widths(page: Any) -> list[int]:
    return list(page.evaluate("[document.documentElement.scrollWidth, innerWidth]"))


def test_it_says_what_is_served_and_asks_nobody_else(server: str, open_page: Open) -> None:
    page = open_page(server)
    about = page.locator("#about").inner_text()
    for word in ("smollm2-135m", "smollm2-135m-dflash2", "pilot auto", "cpu", "int8"):
        assert word in about
    assert page.locator("#keyrow").is_hidden() and page.locator("#error").is_hidden()
    answer(page)
    assert not page.faults
    assert all(url.startswith((server, "data:")) for url in page.urls)


def test_an_answer_is_coloured_by_step(server: str, open_page: Open) -> None:
    page = open_page(server)
    answer(page)
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_completion_tokens": 256}
    found = ask(f"{server}/v1/chat/completions", {**body, "blockpilot": {"timings": True}})
    text, steps = found["choices"][0]["message"]["content"], found["timings"][0]["steps"]
    assert page.locator(".text").text_content() == text
    spans = page.locator(".text span")
    owners = [int(spans.nth(i).get_attribute("data-step")) for i in range(spans.count())]
    assert owners == sorted(owners) and owners[0] == -1 and len(set(owners)) > 10
    bars = page.locator(".strip button")
    emitted = [
        int(re.search(r"(\d+) tokens? emitted", bars.nth(i).get_attribute("title"))[1]) for i in range(bars.count())
    ]
    assert sum(emitted) == sum(step["emitted"] for step in steps)
    assert page.locator(".text .own").count() <= bars.count() + 1
    assert re.search(
        r"\d+ tokens in \d+ steps, .* tokens per step, .* tokens/s", page.locator(".answer .soft").inner_text()
    )


def test_a_click_on_a_step_shows_its_tree(server: str, open_page: Open) -> None:
    page = open_page(server)
    page.select_option("#pilot", "tree:15")
    answer(page)
    bar = page.locator(".strip button").nth(2)
    bar.click()
    assert bar.get_attribute("aria-pressed") == "true"
    checked, emitted = map(int, re.search(r"(\d+) nodes checked, (\d+) token", bar.get_attribute("title")).groups())
    tree = page.locator(".tree svg")
    assert checked == 16 and tree.locator("g").count() == checked + 1
    assert tree.locator(".anchor").count() == tree.locator(".own").count() == 1
    assert tree.locator("g.kept").count() == emitted - 1
    assert tree.locator("g.lost").count() == checked - emitted
    assert "Accepted:" in tree.get_attribute("aria-label")
    path = "".join(
        json.loads(title.rsplit(": ", 1)[0]) for title in tree.locator("g:is(.kept, .own) title").all_text_contents()
    )
    assert page.locator(".text .picked").all_text_contents() and path == "".join(
        page.locator(".picked").all_text_contents()
    )
    page.get_by_role("button", name="Close").click()
    assert page.locator(".tree").is_hidden() and not page.locator(".picked").count()
    assert not page.faults


def test_a_race_shows_the_same_text_and_a_ratio(server: str, open_page: Open) -> None:
    page = open_page(server)
    page.select_option("#pilot", "tree:15")  # it drafts whatever this machine's steps cost
    answer(page, button="#race")
    verdict = page.locator(".verdict").inner_text()
    assert re.fullmatch(r"tree:15: \d+\.\d\d times the speed of plain decoding\. The texts are identical\.", verdict)
    plain, other = page.locator(".lane .text").all_text_contents()
    assert plain == other and len(plain) > 100
    page.locator("select[aria-label^=Speed]").select_option("1")
    speeds = page.locator(".speed")
    wait_until(lambda: all("tokens/s" in text for text in speeds.all_inner_texts()), "the replay did not end")
    steps = [int(re.search(r"(\d+) steps", text)[1]) for text in speeds.all_inner_texts()]
    assert steps[0] > 2 * steps[1]
    page.locator(".strip button").nth(1).click()
    assert page.locator(".tree svg").is_visible()
    page.select_option("#pilot", "ar")
    assert page.locator("#race").is_disabled()
    assert not page.faults


def test_trees_are_not_kept_where_they_would_slow_steps_down(server: str, open_page: Open) -> None:
    page = open_page(server)
    page.route("**/props", lambda route: route.fulfill(json={**ask(f"{server}/props"), "device": "cuda"}))
    page.reload()
    page.locator("#about", has_text="cuda").wait_for()
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request.post_data_json))
    answer(page, button="#race")
    answer(page, "Name a prime number.")
    assert len(asked) == 4 and not any(call["blockpilot"]["trees"] for call in asked)
    first, second, third = page.locator(".text").all_text_contents()
    assert first == second and third
    assert page.locator(".lane").nth(1).locator(".own").count() > 10
    for strip in page.locator(".strip").all():
        strip.locator("button").first.click()
    for tree in page.locator(".tree").all():
        assert "Step 1:" in tree.inner_text() and "No tree was kept" in tree.inner_text()
    assert not page.faults


def test_who_wants_no_motion_sees_the_end_at_once(server: str, open_page: Open) -> None:
    page = open_page(server, reduced_motion="reduce")
    answer(page, "Name a prime number.", button="#race")
    assert all("tokens/s" in text for text in page.locator(".speed").all_inner_texts())


def test_the_keyboard_is_enough(server: str, open_page: Open) -> None:
    page = open_page(server)
    page.keyboard.type("Name a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("prime number.")
    page.keyboard.press("Enter")
    finish(page)
    assert page.locator(".user").text_content() == "Name a\nprime number."
    page.keyboard.press("Shift+Tab")
    assert page.evaluate("document.activeElement.closest('.strip') !== null")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowRight")
    assert page.locator(".tree svg").is_visible() and page.evaluate("document.activeElement.dataset.step") == "1"
    page.keyboard.press("Home")
    assert "Step 1:" in page.locator(".tree figcaption").inner_text()
    page.keyboard.press("Escape")
    assert page.locator(".tree").is_hidden()
    page.keyboard.press("Enter")
    assert page.locator(".tree").is_visible()
    reached = set()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert {"close", "scroll", "prompt", "send", "race", "pilot"} <= reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(server: str, open_page: Open, scheme: str) -> None:
    page = open_page(server, width=360, height=740, color_scheme=scheme, has_touch=True, is_mobile=True)
    assert widths(page) == [360, 360]
    page.select_option("#pilot", "tree:63")
    answer(page, "Name the planets.")
    page.locator(".strip button").nth(1).click()
    assert widths(page) == [360, 360]
    answer(page, QUESTION, button="#race")
    page.locator("summary").click()
    assert widths(page) == [360, 360]


def luminance(colour: str) -> float:
    values = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_can_be_read(server: str, open_page: Open, scheme: str) -> None:
    page = open_page(server, color_scheme=scheme)
    page.evaluate("complain('an error')")
    ground = luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (ground < 0.1) == (scheme == "dark")
    for place in ("body", "#about", "#error", "#prompt"):
        ink = luminance(page.locator(place).evaluate("place => getComputedStyle(place).color"))
        assert (max(ink, ground) + 0.05) / (min(ink, ground) + 0.05) >= 4.5, place


def test_errors_are_one_line_and_the_question_comes_back(server: str, open_page: Open) -> None:
    page = open_page(server)
    line = page.get_by_role("alert")
    full = {"error": {"message": "the queue is full: try again later", "type": "rate_limit_error"}}
    page.route("**/chat/completions", lambda route: route.fulfill(status=429, json=full))
    answer(page)
    assert line.inner_text() == "the queue is full: try again later"
    assert page.locator("#prompt").input_value() == QUESTION and not page.locator(".user").count()
    page.unroute("**/chat/completions")
    page.route("**/chat/completions", lambda route: route.abort())
    answer(page)
    assert line.inner_text() == "The server does not answer. Is it still running?"
    page.unroute("**/chat/completions")
    page.locator("summary").click()
    page.fill("#temperature", "-1")
    page.evaluate("document.querySelector('#form').noValidate = true")
    answer(page)
    assert "temperature must" in line.inner_text()
    page.fill("#temperature", "0")
    answer(page, "Name a prime number.")
    assert line.is_hidden() and page.locator(".answer .text").text_content()


def test_a_key_is_asked_for_where_the_server_needs_one(open_page: Open) -> None:
    with run_server("--api-key", "sesame") as url:
        page = open_page(url)
        assert page.get_by_role("alert").inner_text() == "the API key is missing or wrong"
        assert page.evaluate("document.activeElement.id") == "key"
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        page.locator("#about", has_text="smollm2-135m").wait_for()
        assert page.get_by_role("alert").is_hidden()
        answer(page, "Name a prime number.")
        assert page.locator(".answer .text").text_content()


@pytest.mark.parametrize("way", ["click", "Escape"])
def test_a_stop_ends_the_answer(server: str, open_page: Open, way: str) -> None:
    page = open_page(server)
    set_tokens(page, 8000)
    page.fill("#prompt", "Count from one to five thousand, in words.")
    page.select_option("#pilot", "ar")
    page.click("#send")
    page.locator(".text span").first.wait_for()
    page.click("#send") if way == "click" else page.keyboard.press("Escape")
    finish(page)
    assert page.locator(".answer .soft").last.inner_text() == "Stopped." and page.get_by_role("alert").is_hidden()

    def is_idle() -> bool:
        with urllib.request.urlopen(f"{server}/metrics") as response:
            return bool(re.search(r'num_requests_running{model_name="[^"]*"} 0\.0', response.read().decode()))

    wait_until(is_idle, "the server still answers")


def test_a_second_turn_knows_the_first(server: str, open_page: Open) -> None:
    page = open_page(server)
    page.locator("summary").click()
    page.fill("#system", "You are a teacher.")
    answer(page, "Name a prime number.")
    sent: list[Any] = []
    page.on("request", lambda request: sent.append(request.post_data_json))
    answer(page, "And another one?")
    first = page.locator(".answer .text").first.text_content()
    assert [message["role"] for message in sent[0]["messages"]] == ["system", "user", "assistant", "user"]
    assert sent[0]["messages"][2]["content"] == first
    page.click("#fresh")
    assert not page.locator(".user").count() and page.locator("#welcome").is_visible()
    answer(page, "Hello")
    assert len(sent[-1]["messages"]) == 2


def make_stream(texts: list[str]) -> str:
    """As the server would send one token per step."""
    head, chunks = {"index": 0, "finish_reason": None}, []
    for before, text in zip(["", *texts], texts, strict=False):
        tree = {
            "tokens": [before, "no"],
            "parents": [-1, 0],
            "probabilities": [None, 0.5],
            "accepted": [0],
            "next": text,
        }
        step = {
            "draft_size": 2,
            "checked": 2,
            "emitted": 1,
            "draft_ms": 1,
            "check_ms": 2,
            "pilot_ms": 0.1,
            "tree": tree,
        }
        chunks.append({"choices": [{**head, "delta": {"content": text}}], "timings": {"steps": [step]}})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def test_what_a_model_writes_is_text(server: str, open_page: Open) -> None:
    page = open_page(server)
    texts = ["<img src=x onerror=alert(1)>", "<script>alert(1)</script>", "&amp; ", "\U0001f600 \u05d0"]
    page.route(
        "**/chat/completions", lambda route: route.fulfill(body=make_stream(texts), content_type="text/event-stream")
    )
    answer(page, "<b>bold</b>")
    page.locator(".strip button").first.click()
    assert page.locator(".text").text_content() == "".join(texts)
    assert page.locator(".user").text_content() == "<b>bold</b>"
    assert not page.locator("#talk img, #talk script, #talk .user b").count() and not page.faults


def test_long_answers_stay_fast(server: str, open_page: Open) -> None:
    page = open_page(server)
    body = make_stream([f" word{i}" for i in range(3000)])
    page.route("**/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    started = time.monotonic()
    answer(page)
    page.locator(".strip button").nth(2000).click()
    assert page.locator(".strip button").count() == 3000 and page.locator(".tree svg").is_visible()
    assert time.monotonic() - started < 10
