"""The page in a real browser: nothing is logged, nothing is fetched, the drawings are there."""

import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit import report_sample
from tests.toolkit.report_page import Page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")


class Site:
    """Serves one page as http://report.test/ and answers 404 for every other address, wherever it is."""

    def __init__(self) -> None:
        self.page = b""
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = self.path == "http://report.test/"
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write(site.page if found else b"")

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@pytest.fixture
def site() -> Iterator[Site]:
    running = Site()
    thread = threading.Thread(target=running.server.serve_forever)
    thread.start()
    yield running
    running.server.shutdown()
    running.server.server_close()
    thread.join()


def _visit(site: Site, html: bytes, folder: Path) -> tuple[str, list[str], list[str]]:
    """Return the document as the browser built it, its console lines, and what it asked for."""
    assert BROWSER is not None
    site.page = html
    net_log = folder / "net.json"
    done = subprocess.run(
        [
            BROWSER,
            *(
                "--headless",
                "--window-size=1200,2000",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-default-apps", "--disable-extensions", "--disable-dev-shm-usage"),
            f"--user-data-dir={folder / 'profile'}",
            # Every request ends at our server, whatever host it names.
            f"--proxy-server=http://127.0.0.1:{site.server.server_port}",
            f"--log-net-log={net_log}",
            *("--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom", "http://report.test/"),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, console, _requests_of_page(net_log)


def _requests_of_page(net_log: Path) -> list[str]:
    """Return what the page asked for; what the browser asks for itself has no initiator."""
    log = json.loads(net_log.read_text(encoding="utf-8"))
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    started = [
        event["params"]
        for event in log["events"]
        if event["type"] == start and "url" in event.get("params", ())
    ]
    assert any(params["url"] == "http://report.test/" for params in started)
    return [params["url"] for params in started if params.get("initiator") == "http://report.test"]


@pytest.mark.parametrize("sample", ["packaged", "refused", "bare"])
def test_page_opens_without_console_messages_or_requests(sample: str, site: Site, tmp_path: Path) -> None:
    page = Page(getattr(report_sample, sample)(), tmp_path)
    built, console, requests = _visit(site, page.path.read_bytes(), tmp_path)

    assert console == []
    assert requests == []
    assert built.count("<svg") == len(page.all("svg"))


def test_markup_past_the_escaping_runs_and_loads_nothing(site: Site, tmp_path: Path) -> None:
    """The policy is the second line of defence."""
    page = Page(report_sample.bare(), tmp_path)
    attack = b"<script>document.title='taken'</script><img src=http://evil.test/x.png></main>"
    built, console, requests = _visit(site, page.path.read_bytes().replace(b"</main>", attack, 1), tmp_path)

    assert "taken</title>" not in built
    assert requests == []
    assert len(console) >= 2


def test_page_without_policy_is_seen_to_log_and_to_request(site: Site, tmp_path: Path) -> None:
    html = b"<!doctype html><script>console.error('seen')</script><img src=http://evil.test/x.png>"
    _, console, requests = _visit(site, html, tmp_path)

    assert any("seen" in line for line in console)
    assert "http://evil.test/x.png" in requests


# Run in the page: what is wider than the place it has, and which texts of a plot lie on each other.
MEASURE = """<script>addEventListener('load', () => {
  const wide = [...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
    ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map(e => e.ariaLabel);
  if (document.documentElement.scrollWidth > innerWidth) wide.push('page');
  const covered = [];
  for (const plot of document.querySelectorAll('svg.plot')) {
    const texts = [...plot.querySelectorAll('.point-label, .limit-text, .baseline-text')];
    const boxes = texts.map(t => t.getBoundingClientRect());
    boxes.forEach((a, i) => boxes.slice(0, i).forEach((b, j) => {
      const dx = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const dy = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      // Boxes of letters have room above and below them.
      if (dx > 0 && dy > 3) covered.push(texts[i].textContent + ' on ' + texts[j].textContent);
    }));
  }
  document.title = JSON.stringify({width: innerWidth, wide, covered});
});</script></main>"""


def _measured(site: Site, page: Page, folder: Path) -> Any:
    html = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", page.html).replace("</main>", MEASURE, 1)
    built, _, _ = _visit(site, html.encode(), folder)
    match = re.search(r"<title>(\{.*?\})</title>", built)
    assert match is not None
    return json.loads(match[1])


def crowded() -> dict[str, Any]:
    """A report for a target with a long name, with close points and figures of both origins."""
    document = report_sample.packaged()
    for index, candidate in enumerate(document["candidates"]):
        candidate["label"] = f"int8 per-channel equalized, matrix products only, {index} layers in float"
        for figure in candidate["figures"].values():
            figure["value"] = 18.75 if figure["value"] is None else figure["value"]
            figure["on"] = "jetson-orin-nano" if figure["on"] == "rpi5" else figure["on"]
        if index > 1:
            candidate["figures"]["size"]["value"] = 4_930_118 + 20_000 * index
            candidate["figures"]["score"]["value"] = 0.88 + 0.0001 * (index % 3)
    return document


@pytest.mark.parametrize("sample", ["packaged", "refused", "crowded"])
def test_at_1200_px_nothing_scrolls_sideways_and_no_label_covers_another(
    sample: str, site: Site, tmp_path: Path
) -> None:
    document = crowded() if sample == "crowded" else getattr(report_sample, sample)()
    measured = _measured(site, Page(document, tmp_path), tmp_path)

    assert measured == {"width": 1200, "wide": [], "covered": []}
