"""The story in a browser, first half: a new fleet, a good release, and a bad one that stops by itself."""

from tests.chromium import browser  # noqa: F401  # a fixture
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.fleet.console.story_site import find_name, operator  # noqa: F401  # a fixture
from tests.waiting import wait_for


def test_operator_sees_a_good_release_through_and_a_bad_one_stop(operator):  # noqa: F811
    page, site = operator.page, operator.site
    setup = site.setup
    operator.enter()
    operator.roll_out_first()

    # A good one goes out in waves, tried beside the first on each device.
    operator.release(setup.good, picture="upload")
    operator.plan(waves="10%,25%,50%,100%", trial="shadow", picture="plan")
    operator.start()
    page.wait(".waves .counts", "succeeded", 40)
    operator.photograph("rollout-live")
    operator.stay()
    operator.watch("succeeded")

    # A bad one stops by itself, and says why.
    operator.release(setup.bad)
    operator.plan(waves="10%,25%,50%,100%", trial="shadow")
    operator.start(find_name(setup.bad.version, slice(3)))
    operator.watch("aborted")
    assert "stopped, and" in page.text(".lead")
    page.wait(".gate.stops", "This stopped it.")
    assert page.find(".gate.stops svg.chart")
    assert page.find(".reasons a", "real")  # its own trial had refused it before
    wait_for(lambda: site.count(setup.good.version) == 21, "the way back", 30)
    operator.photograph("rollout-stopped")

    # Model health follows the reports while its page is open.
    page.click("nav a", "Model health")
    operator.stay()
    page.run("window.shown = document.getElementById('health').outerHTML; 0")
    news = "document.getElementById('health').outerHTML !== window.shown"
    wait_for(lambda: page.run(news), "new figures on the open page", 30)
    assert page.run("window.isSame === true")
    operator.photograph("health")

    site.check_end(["succeeded", "succeeded", "aborted"])
    operator.check_end()
