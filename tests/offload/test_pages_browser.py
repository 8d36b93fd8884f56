"""The pages of offload in a real browser: nothing is logged, and they fit wide and narrow screens."""

import http.server
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from tests.offload.planning_sample import hostile, sample
from tests.offload.test_demo import recorded

from edgekit_offload.demo.demo_page import render_saved_page
from edgekit_offload.demo.live_server import LiveServer
from edgekit_offload.report.plan_page import render_plan_page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH")

PAGES = {
    "plan": lambda: render_plan_page(sample()),
    "hostile": lambda: render_plan_page(hostile()),
    "demo": lambda: render_saved_page(recorded()),
}
# Run in the page: what is wider than the window, and how many charts are shown.
MEASURE = """<script>addEventListener('load', () => {
  const inScroller = e => e.closest('.scroll') || e.closest('svg');
  const wide = [...document.querySelectorAll('main *')].filter(e => !inScroller(e) &&
    e.getBoundingClientRect().right > innerWidth + 1).map(e => e.tagName + '.' + e.className);
  if (document.documentElement.scrollWidth > innerWidth) wide.push('page');
  const shown = [...document.querySelectorAll('svg.plot')].filter(e => e.getBoundingClientRect().width > 0);
  const cut = [...document.querySelectorAll('.scroll')].filter(e => innerWidth > 1000 &&
    e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel);
  const tall = [...document.querySelectorAll('#candidates ~ * tr')].filter(e => e.offsetHeight > 100).length;
  document.title = JSON.stringify({width: innerWidth, wide, cut, tall, charts: shown.length});
});</script></main>"""


class Site(http.server.ThreadingHTTPServer):
    """Serves one page inside a frame of any width."""

    def __init__(self) -> None:
        self.page, self.frame = "", ""
        site = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body = {"/": site.page, "/frame": site.frame}.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.end_headers()
                self.wfile.write((body or "").encode())

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def visit(url: str, folder: Path, *options: str) -> tuple[str, list[str]]:
    """Return the document as the browser built it, and its console lines."""
    assert BROWSER is not None
    command = [
        *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-extensions"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr"),
        *("--window-size=1200,2000", "--virtual-time-budget=3000", *options, "--dump-dom", url),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("name", list(PAGES))
def test_page_opens_without_console_messages_and_keeps_its_charts(
    name: str, site: Site, tmp_path: Path
) -> None:
    site.page = PAGES[name]()
    built, console = visit(f"http://127.0.0.1:{site.server_port}/", tmp_path)

    assert console == []
    assert built.count("<svg") == site.page.count("<svg") > 0


@pytest.mark.parametrize("width", [1200, 390])
@pytest.mark.parametrize("name", list(PAGES))
def test_page_fits_the_screen_and_shows_one_chart(name: str, width: int, site: Site, tmp_path: Path) -> None:
    assert measured(site, PAGES[name](), width, tmp_path) == {
        "width": width,
        "wide": [],
        "cut": [],
        "tall": ANY if name == "hostile" or width < 1000 else 0,
        "charts": 1,
    }


def measured(site: Site, page: str, width: int, folder: Path) -> Any:
    """Return what `MEASURE` finds in a page that is as wide as this; a window has at least 500 pixels."""
    html = re.sub(r"<meta[^>]*Content-Security-Policy[^>]*>", "", page).replace("</main>", MEASURE, 1)
    site.page = html
    site.frame = (
        f"<!doctype html><title>waits</title><iframe src='/' style='width:{width}px;height:1900px;border:0'"
        " onload='setTimeout(() => { document.title = this.contentDocument.title; }, 500)'></iframe>"
    )
    built, _ = visit(f"http://127.0.0.1:{site.server_port}/frame", folder)
    match = re.search(r"<title>(\{.*?\})</title>", built)
    assert match is not None, built[:500]
    return json.loads(match[1])


def test_live_page_follows_the_demo_and_logs_nothing(tmp_path: Path) -> None:
    with LiveServer(recorded) as live:
        built, console = visit(live.url, tmp_path)

    assert console == []
    assert "<polyline" in built
    assert "Result" in built
