"""Opens a page of `amk report` in headless Chromium: nothing on the console, no request to anywhere, under a megabyte. Not in CI.

    AMK_REPORT_PAGE=/tmp/page.html cargo test -p amk --bin amk html       # the page of 10 000 synthetic trials
    python3 tests/browser/report.py /tmp/page.html
    python3 tests/browser/report.py night/report.html 0      # the page of `amk fleet report`, which has tables only

It needs `chromium` (or CHROMIUM=PATH) and nothing else. A page that breaks each promise is opened first: the check must see it.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile

BYTES_MAX = 1_000_000
BAD = """<!doctype html><title>bad</title><body><p>text</p><img src="http://127.0.0.1:9/pixel.png">
<script>console.error("something is wrong")</script></body>"""


def look(page):
    """What the browser did with a page: its DOM, lines of the console, addresses that were asked for."""
    with tempfile.TemporaryDirectory() as folder:
        log = pathlib.Path(folder) / "net.json"
        command = [
            os.environ.get("CHROMIUM", "chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
            "--disable-component-update", "--no-first-run", f"--user-data-dir={folder}/profile", "--enable-logging=stderr",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", f"--log-net-log={log}", "--virtual-time-budget=5000", "--dump-dom", page.resolve().as_uri(),
        ]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr[-2000:]
        console = [line for line in ran.stderr.splitlines() if ":CONSOLE" in line]
        text = log.read_text()
        # The log is cut off when the browser ends at once.
        try:
            events = json.loads(text)["events"]
        except json.JSONDecodeError:
            events = json.loads(text.rstrip().rstrip(",") + "]}")["events"]
    # The browser has errands of its own, which no document has begun.
    starts = (event["params"] for event in events if isinstance(event.get("params", {}).get("url"), str))
    urls = {start["url"] for start in starts if start.get("initiator", "not an origin") != "not an origin"}
    return ran.stdout, console, sorted(url for url in urls if not url.startswith(("file:", "data:")))


def main():
    with tempfile.TemporaryDirectory() as folder:
        bad = pathlib.Path(folder) / "bad.html"
        bad.write_text(BAD)
        _, console, urls = look(bad)
        assert any("something is wrong" in line for line in console), "an error on the console is not seen"
        assert any("127.0.0.1:9" in url for url in urls), "a request is not seen"
    page = pathlib.Path(sys.argv[1])
    size = page.stat().st_size
    dom, console, urls = look(page)
    assert size < BYTES_MAX, f"{size} bytes"
    assert not console, console
    assert not urls, urls
    charts = dom.count("<svg")
    least = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    assert charts >= least, "no chart was drawn"
    assert charts or dom.count("<table"), "nothing is on the page"
    print(f"{page}: {size} bytes, {charts} charts, nothing on the console, no request")


if __name__ == "__main__":
    main()
