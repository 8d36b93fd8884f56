"""The story in a browser, second half: an approval, a cut network, a pause, and the way back by name."""

import pytest
from tests.chromium import browser  # noqa: F401  # a fixture
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
    page.wait(".counts", "succeeded", 40)
    operator.press("Pause")
    operator.watch("paused")
    operator.photograph("rollout-paused")
    operator.press("Resume")
    wait_for(lambda: site.count(setup.last.version) == 13, "the connected ones", 40)
    assert page.text(".head .state").strip() == "running"
    site.restore(cut)
    operator.watch("succeeded", 60)

    # It is rolled back after all, by its name.
    page.click(".orders a", "Roll back")
    assert page.find(".lead", "21 devices go back")
    page.type("#confirm", "something else")
    page.click(".orders button", "Roll back")
    page.wait(".problem", f"write the rollout's name: {name}")
    page.type("#confirm", name)
    page.type("#note", "we changed our minds")
    operator.photograph("rollout-back")
    page.click(".orders button", "Roll back")
    operator.stay()
    operator.watch("aborted")
    wait_for(lambda: site.count(setup.first.version) == 21, "the way back", 40)
    page.wait(".timeline p", "ordered the way back: we changed our minds")

    # The release is withdrawn; the other pages show what was.
    page.click("dl a", setup.last.version)
    page.click("a", "Withdraw")
    page.type("#confirm", setup.last.version)
    page.click(".orders button", "Withdraw")
    page.wait(".notice", "is withdrawn")
    for section in ("Fleet", "Rollouts", "Releases", "Audit"):
        page.click("nav a", section)
        operator.photograph(section.lower())

    site.check_end(["succeeded", "aborted"])
    operator.check_end()
