"""The story in a browser, second half: an approval, a cut network, a pause, and the way back by name."""

import pytest
from playwright.sync_api import expect
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.fleet.console.story_site import find_name, operator, order_of  # noqa: F401  # a fixture
from tests.waiting import wait_for

pytestmark = pytest.mark.long

CUT = slice(-8, None)


def test_operator_rolls_out_over_a_cut_network_and_back(operator):  # noqa: F811
    page, site = operator.page, operator.site
    setup = site.setup
    operator.enter()
    operator.roll_out_first()

    # The network of some is cut; the next release waits for them, and for a person.
    name = find_name(setup.last.version, CUT)
    cut = order_of(name)[CUT]
    site.cut(cut)
    wait_for(lambda: site.count_online() == 13, "the cut to show", 30)
    operator.release(setup.last)
    operator.plan(waves="50%,100%", approval="first")
    operator.start(name)
    operator.press("Approve wave 1")
    expect(page.locator(".counts", has_text="succeeded").first).to_be_visible(timeout=40_000)
    operator.press("Pause")
    operator.watch("paused")
    operator.photograph("rollout-paused")
    operator.press("Resume")
    wait_for(lambda: site.count(setup.last.version) == 13, "the connected ones", 40)
    expect(page.locator(".head .state:visible")).to_have_text("running")
    site.restore(cut)
    operator.watch("succeeded", 60)

    # It is rolled back after all, by its name.
    operator.click(".orders a", "Roll back")
    expect(page.locator(".lead:visible")).to_contain_text("21 devices go back")
    page.fill("#confirm", "something else")
    operator.click(".orders button", "Roll back")
    expect(page.locator(".problem:visible")).to_contain_text(f"write the rollout's name: {name}")
    page.fill("#confirm", name)
    page.fill("#note", "we changed our minds")
    operator.photograph("rollout-back")
    operator.press("Roll back")
    operator.watch("aborted")
    wait_for(lambda: site.count(setup.first.version) == 21, "the way back", 40)
    order = page.locator(".timeline p", has_text="ordered the way back: we changed our minds")
    expect(order.first).to_be_visible()

    # The release is withdrawn; the other pages show what was.
    operator.click("dl a", setup.last.version)
    operator.click("a", "Withdraw")
    page.fill("#confirm", setup.last.version)
    operator.click(".orders button", "Withdraw")
    expect(page.locator(".notice:visible")).to_contain_text("is withdrawn")
    for section in ("Fleet", "Rollouts", "Releases", "Audit"):
        operator.click("nav a", section)
        operator.photograph(section.lower())

    site.check_end(["succeeded", "aborted"])
    operator.check_end()
