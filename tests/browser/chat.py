"""The page of `amk serve` in headless Chromium: send, stream, stop, error, reload, by keyboard, wide and narrow. Not in CI.

    pip install playwright                                # its driver only: the browser is the system's
    python3 tests/browser/chat.py target/debug/amk [FOLDER for screenshots]

It needs `chromium` (or CHROMIUM=PATH).
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

from playwright.sync_api import expect, sync_playwright

GOLDEN = "corpus/golden/llama3-rope-bf16"


def serve(amk, *arguments):
    command = [amk, "serve", "--addr", "127.0.0.1:0", *arguments]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return server, json.loads(server.stdout.readline())["url"].removesuffix("/v1")


def ended(page):
    expect(page.locator("#go")).to_have_text("Send", timeout=30_000)


def converse(page, shot):
    say, log = page.locator("#say"), page.locator("#log")
    expect(page.locator("#state")).to_contain_text(re.compile(r"requests, \d+% busy, \d+ tokens/s"), timeout=8000)
    assert page.title() == "llama3-rope-bf16", page.title()
    shot("empty")
    page.locator("summary").click()
    page.locator("#limit").fill("40")
    page.locator("summary").click()
    # The message has the focus from the start.
    say.focus()
    page.keyboard.type("Two lines:")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("<b>not bold</b>")
    page.keyboard.press("Enter")
    ended(page)
    assert log.locator(".user").inner_text() == "Two lines:\n<b>not bold</b>", "text, not markup"
    first = log.locator(".assistant").inner_text()
    assert first and "tokens/s" in log.locator(".figures").inner_text(), log.inner_html()
    assert page.evaluate("document.activeElement.id") == "say"
    shot("answered")
    page.reload()
    assert log.locator(".assistant").inner_text() == first, "a reload keeps the conversation"
    assert page.locator("#limit").input_value() == "40"


def stop(page):
    """A text without a limit is stopped while it comes; the model may have ended before, so that this is tried again."""
    page.locator("summary").click()
    page.locator("#limit").fill("")
    page.locator("#temperature").fill("2")
    page.locator("summary").click()
    for _ in range(20):
        page.locator("#fresh").click()
        page.locator("#say").fill("Go on")
        page.keyboard.press("Enter")
        expect(page.locator(".assistant")).not_to_be_empty()
        page.keyboard.press("Escape")
        ended(page)
        if page.locator(".figures").inner_text().endswith("stopped"):
            return page.locator(".assistant").inner_text()
    raise AssertionError("no text could be stopped")


def wrong(page, server):
    page.locator("#say").fill("x" * 40_000)
    page.keyboard.press("Enter")
    ended(page)
    alert = page.get_by_role("alert")
    assert "do not fit" in alert.inner_text(), alert.inner_text()
    assert len(page.locator("#say").input_value()) == 40_000, "it can be changed and sent again"
    page.locator("#say").fill("Hello")
    server.send_signal(signal.SIGINT)
    server.wait(20)
    page.keyboard.press("Enter")
    ended(page)
    assert page.get_by_role("alert").count() == 1, page.content()
    expect(page.locator("#state")).to_contain_text("no answer")


def main():
    amk, shots = sys.argv[1], pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else None
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for width, scheme in [(1200, "light"), (380, "dark")]:
            server, url = serve(amk, "--model", GOLDEN, "--device", "cpu")
            try:
                context = browser.new_context(viewport={"width": width, "height": 760}, color_scheme=scheme)
                page, said, asked = context.new_page(), [], []
                page.on("console", lambda message: said.append(message.text))
                page.on("pageerror", lambda error: said.append(str(error)))
                page.on("request", lambda request: asked.append(request.url))

                def shot(name):
                    if shots:
                        page.screenshot(path=shots / f"{name}-{width}.png")
                    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
                    assert overflow <= 0, f"{overflow} pixels beyond the width of {width}"

                page.goto(url)
                converse(page, shot)
                assert not said, said
                text = stop(page)
                shot("stopped")
                wrong(page, server)
                shot("wrong")
                assert all(address.startswith((url, "data:")) for address in asked), asked
                print(f"{width} pixels, {scheme}: {len(text)} characters until the stop, {len(asked)} requests")
                context.close()
            finally:
                server.kill()
        browser.close()


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.1f} s")
