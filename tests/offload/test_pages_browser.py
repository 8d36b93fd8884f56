"""The pages of offload in a real browser: nothing is logged, and they fit wide and narrow screens."""

from unittest.mock import ANY

import pytest
from playwright.sync_api import Page, expect
from tests.browser import list_messages, load
from tests.offload.planning_sample import hostile, sample
from tests.offload.test_demo import recorded

from edgekit_offload.demo.demo_page import render_saved_page
from edgekit_offload.demo.live_server import LiveServer
from edgekit_offload.report.plan_page import render_plan_page

PAGES = {
    "plan": lambda: render_plan_page(sample()),
    "hostile": lambda: render_plan_page(hostile()),
    "demo": lambda: render_saved_page(recorded()),
}
# Run in the page: what is wider than the window, and how many charts are shown.
MEASURE = """() => {
  const root = document.documentElement;
  const inScroller = e => e.closest('.scroll') || e.closest('svg');
  const wide = [...document.querySelectorAll('main *')].filter(e => !inScroller(e) &&
    e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.tagName + '.' + e.className);
  if (root.scrollWidth > root.clientWidth) wide.push('page');
  const shown = [...document.querySelectorAll('svg.plot')].filter(e => e.getBoundingClientRect().width > 0);
  const cut = [...document.querySelectorAll('.scroll')].filter(e => innerWidth > 1000 &&
    e.scrollWidth > e.clientWidth + 1).map(e => e.ariaLabel);
  const tall = [...document.querySelectorAll('#candidates ~ * tr')].filter(e => e.offsetHeight > 100).length;
  return {width: innerWidth, wide, cut, tall, charts: shown.length};
}"""


@pytest.mark.parametrize("name", list(PAGES))
def test_page_has_no_console_messages_and_fits_wide_and_narrow_screens(name: str, page: Page) -> None:
    html = PAGES[name]()
    load(page, html)

    assert page.locator("svg").count() == html.count("<svg") > 0
    for width in (1200, 390):
        page.set_viewport_size({"width": width, "height": 1900})
        assert page.evaluate(MEASURE) == {
            "width": width,
            "wide": [],
            "cut": [],
            "tall": ANY if name == "hostile" or width < 1000 else 0,
            "charts": 1,
        }
    assert list_messages(page) == []


def test_live_page_follows_the_demo_and_logs_nothing(page: Page) -> None:
    with LiveServer(recorded) as live:
        with page.expect_response("**/state") as state:
            page.goto(live.url)
        assert state.value.ok
        expect(page.locator("svg polyline").first).to_be_visible()
        expect(page.locator("main")).to_contain_text("Result")

        assert list_messages(page) == []
