"""The story in a browser, first half: a new fleet, good releases, and a bad one that stops by itself."""

import pytest
from playwright.sync_api import expect
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.fleet.console.story_site import find_name, operator  # noqa: F401  # a fixture
from tests.waiting import wait_for


@pytest.mark.long
def test_operator_sees_good_releases_through_and_a_bad_one_stop(operator):  # noqa: F811
    page, site = operator.page, operator.site
    setup = site.setup
    operator.enter()
    operator.roll_out_first()

    roll_out_in_waves(operator)

    # A bad one stops by itself, and says why.
    operator.release(setup.bad)
    operator.plan(waves="10%,25%,50%,100%", trial="shadow")
    operator.start(find_name(setup.bad.version, slice(3)))
    operator.watch("aborted")
    expect(page.locator(".lead:visible")).to_contain_text("stopped, and")
    gate = page.locator(".gate.stops", has_text="This stopped it.")
    expect(gate.locator("svg.chart")).to_be_visible()
    # Its own trial had refused it before.
    expect(page.locator(".reasons").get_by_role("link", name="real", exact=True)).to_be_visible()
    wait_for(lambda: site.count(setup.good.version) == 21, "the way back", 30)
    operator.photograph("rollout-stopped")

    # Model health follows the reports while its page is open.
    operator.click("nav a", "Model health")
    operator.stay()
    page.evaluate("window.before = document.getElementById('health').outerHTML")
    # The policy of the page forbids eval(), which `wait_for_function` needs.
    changed = "document.getElementById('health').outerHTML !== window.before"
    wait_for(lambda: page.evaluate(changed), "the page to follow")
    assert page.evaluate("window.isSame === true")
    operator.photograph("health")

    site.check_end(["succeeded", "succeeded", "aborted"])
    operator.check_end()


def roll_out_in_waves(operator):  # noqa: F811
    """Bring a good version to all devices, tried beside the first on each."""
    operator.release(operator.site.setup.good, picture="upload")
    operator.plan(waves="10%,25%,50%,100%", trial="shadow", picture="plan")
    operator.start()
    expect(operator.page.locator(".waves .counts", has_text="succeeded").first).to_be_visible(timeout=40_000)
    operator.photograph("rollout-live")
    operator.stay()
    operator.watch("succeeded")
