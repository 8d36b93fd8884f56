"""A Chromium that tests drive through playwright; `page` is a tab with cookies of its own."""

import shutil
from collections.abc import Iterator
from typing import Final, Literal

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect, sync_playwright

ADDRESS: Final = "http://page.test/"
CHROMIUM: Final = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
NO_SCROLL_BARS: Final = "html { scrollbar-width: none }"  # in pictures
expect.set_options(timeout=20_000)


# For one file: while playwright runs, no test of its process can call asyncio.run.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium on PATH")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(
            executable_path=CHROMIUM,
            # No renderer is started for a page that may follow.
            args=["--disable-gpu", "--renderer-process-limit=1"],
            ignore_default_args=["--hide-scrollbars"],  # they take 15 pixels of a page, as on a desk
        ) as browser,
    ):
        yield browser


@pytest.fixture(scope="module")
def tabs(browser: Browser) -> Iterator[BrowserContext]:
    """The tabs of a file's tests; an empty one is always open, whose process shows the others too."""
    with browser.new_context() as context:
        context.new_page()
        yield context


@pytest.fixture
def page(tabs: BrowserContext) -> Iterator[Page]:
    page = tabs.new_page()
    yield page
    for opened in tabs.pages[1:]:
        opened.close()
    tabs.clear_cookies()


def set_view(page: Page, width: int, height: int = 900, *, theme: Literal["light", "dark"] = "light") -> None:
    page.set_viewport_size({"width": width, "height": height})
    page.emulate_media(color_scheme=theme)


def load(page: Page, html: str) -> list[str]:
    """Open `html` under `ADDRESS`; return what it requests, now and later: none of it is answered."""
    requests: list[str] = []

    def answer(route: Route) -> None:
        if route.request.url == ADDRESS:
            route.fulfill(body=html, content_type="text/html; charset=utf-8")
        else:
            requests.append(route.request.url)
            route.abort()

    page.route("**/*", answer)
    page.goto(ADDRESS)
    return requests


def list_messages(page: Page) -> list[str]:
    """Return what the page wrote to its console, what it could not load, and its uncaught errors."""
    messages = [message.text for message in page.console_messages(filter="all")]
    return messages + [str(error) for error in page.page_errors(filter="all")]
