"""The page in a real browser: nothing is logged, nothing is fetched, the drawings are there."""

from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from tests.browser import list_messages, load
from tests.toolkit import report_page, report_sample


@pytest.mark.parametrize("sample", ["packaged", "refused", "bare"])
def test_page_opens_without_console_messages_or_requests(sample: str, page: Page, tmp_path: Path) -> None:
    report = report_page.Page(getattr(report_sample, sample)(), tmp_path)
    requests = load(page, report.html)

    assert page.locator("svg").count() == len(report.all("svg"))
    assert list_messages(page) == []
    assert requests == []


def test_markup_past_the_escaping_runs_and_loads_nothing(page: Page, tmp_path: Path) -> None:
    """The policy is the second line of defence."""
    html = report_page.Page(report_sample.bare(), tmp_path).html
    attack = "<script>document.title='taken'</script><img src=http://evil.test/x.png></main>"
    requests = load(page, html.replace("</main>", attack, 1))

    assert page.title() != "taken"
    assert len(list_messages(page)) >= 2
    assert requests == []


def test_page_without_policy_is_seen_to_log_and_to_request(page: Page) -> None:
    html = "<!doctype html><script>console.error('seen')</script><img src=http://evil.test/x.png>"
    requests = load(page, html)

    assert "seen" in list_messages(page)
    assert requests == ["http://evil.test/x.png"]


# Run in the page: what is wider than the place it has, and which texts of a plot lie on each other.
MEASURE = """() => {
  const wide = [...document.querySelectorAll('*')].filter(e => e.scrollWidth > e.clientWidth + 1 &&
    ['auto', 'scroll'].includes(getComputedStyle(e).overflowX)).map(e => e.ariaLabel);
  const root = document.documentElement;
  if (root.scrollWidth > root.clientWidth) wide.push('page');
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
  return {width: innerWidth, wide, covered};
}"""


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
    sample: str, page: Page, tmp_path: Path
) -> None:
    document = crowded() if sample == "crowded" else getattr(report_sample, sample)()
    page.set_viewport_size({"width": 1200, "height": 2000})
    load(page, report_page.Page(document, tmp_path).html)

    assert page.evaluate(MEASURE) == {"width": 1200, "wide": [], "covered": []}
