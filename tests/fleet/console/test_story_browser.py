"""The whole story in a browser: a good release, a bad one that stops by itself, a cut network, the way back.

Broker, manager, console and one device with service and agent are real; 20 devices are simulated. An operator
does everything by the pages. It takes about a minute. With EDGEKIT_PICTURES=FOLDER the pictures of
docs/console.md are written there.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from tests.chromium import browser  # noqa: F401  # a fixture
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.fleet.console.conftest import Served
from tests.waiting import wait_for

from edgekit_fleet.demo.network import Network
from edgekit_fleet.demo.real_device import Application, RealDevice
from edgekit_fleet.demo.running_manager import running_manager
from edgekit_fleet.operations import devices, releases, rollouts
from edgekit_fleet.rollouts.waves import freeze_cohort
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.commands.fleet.demo_packages import MODEL, TARGET, make_setup

SIMULATED = tuple(f"sim-{number:02}" for number in range(1, 21))
FIRST, CUT = slice(3), slice(-8, None)
NEAR, SERVERS = "127.0.0.2", "127.0.0.1"  # the real device finds the fleet behind a network that can be cut
FAST = DeviceBehaviour(figures_s=1.0, trial_s=1.0, requests_per_s=100.0)
VIEWS = {"": (1200, "light"), "-dark": (1200, "dark"), "-phone": (390, "light")}

pytestmark = pytest.mark.usefixtures("mosquitto")


def find_name(version, some):
    """Return a name of a rollout with the real device among some of its order, which the name draws."""
    names = (f"{version}-try{number}" for number in itertools.count(1))
    return next(name for name in names if "real" in order_of(name)[some])


def order_of(rollout):
    return freeze_cohort(rollout, dict.fromkeys(("real", *SIMULATED), TARGET))


class Site:
    """A fleet that runs, with its devices and its console."""

    def __init__(self, parts, folder):
        self.setup = make_setup(folder)
        self.fleet = parts.enter_context(running_manager(folder / "fleet", self.setup.home, (NEAR, SERVERS)))
        settings = self.fleet.settings
        self.network = parts.enter_context(Network(NEAR, SERVERS, (settings.broker_port, settings.web_port)))
        self.device = RealDevice(folder / "real", MODEL, TARGET)
        parts.callback(self.device.close)
        self.application = Application(self.device.socket_path, MODEL, self.setup.calls)
        parts.callback(self.application.close)
        self.console = Served(self.fleet.folder)
        parts.callback(self.console.close)
        self.simulated = parts.enter_context(self._join(folder))

    def _join(self, folder):
        fleet, versions = self.fleet, (self.setup.first, self.setup.good, self.setup.bad, self.setup.last)
        (invitation,) = devices.invite(
            fleet.store, fleet.settings, fleet.authority, ("real",), actor="test", target=TARGET
        )
        self.device.join(invitation.code)
        members = enrol_simulated(
            fleet.store,
            fleet.authority,
            SIMULATED,
            folder / "simulated",
            target=TARGET,
            tags={"site": "lyon"},
        )
        return SimulatedFleet(
            members,
            read_access(fleet.authority, fleet.settings),
            behaviours=dict.fromkeys(SIMULATED, FAST),
            versions={one.version: VersionBehaviour(agreement=one.agreement) for one in versions},
        )

    def release(self, version):
        keys = TrustStore.from_folder(self.setup.home / "keys")
        releases.make_release(
            self.fleet.folder, self.fleet.store, keys, [version.path], actor="ci", name=version.version
        )

    def count(self, version):
        found = devices.list_devices(self.fleet.store, lambda _: True)
        return sum(one.models.get(MODEL) == version for one in found)

    def count_online(self):
        return sum(one.is_online for one in devices.list_devices(self.fleet.store, lambda _: True))

    def cut(self, names):
        self.network.cut()
        self.simulated.cut(set(names) - {"real"})

    def restore(self, names):
        self.network.restore()
        self.simulated.restore(set(names) - {"real"}, within_s=1.0)


class Operator:
    """Somebody who works at the pages."""

    def __init__(self, page, site, pictures):
        self.page, self.site, self.pictures = page, site, pictures
        self.address = site.console.address

    def enter(self):
        if not hasattr(self.site.console.console, "first_admin"):
            return
        self.page.open(f"{self.address}/first?code={self.site.console.console.first_admin.secret}")
        self.page.type("#name", "maria")
        self.page.type("#password", "a good long password")
        self.page.click("button", "Begin")
        self.page.wait("h1", "Fleet")

    def plan(self, release, *, picture="", **fields):
        self.page.open(f"{self.address}/rollouts/new?release={release}")
        self.page.click("summary", "Trial, approval", leaves=False)
        for name, value in {"soak_min": "0.02", **fields}.items():
            (self.page.choose if name in ("trial", "approval") else self.page.type)(f"#{name}", value)
        self.page.click("button", "Show what would happen")
        self.page.wait("h2", "What would happen")
        self.photograph(picture)

    def start(self, name=""):
        if name:
            self.page.type("#name", name)
        self.page.click("button", "Start:")
        self.page.wait(".head .state")
        self.page.run("window.isSame = true")  # gone with the next page
        return self.page.text("h1")

    def watch(self, state, limit_s=40.0):
        """Wait until the open page shows that state, by its own live updates."""
        self.page.wait(".head .state", state, limit_s)
        assert self.page.run("window.isSame === true")

    def press(self, button):
        self.page.click(".orders button", button)
        self.page.run("window.isSame = true")

    def photograph(self, name):
        if not name:
            return
        for suffix, (width, scheme) in VIEWS.items():
            self.page.set_view(width, scheme=scheme)
            wide = self.page.run("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, f"{name}{suffix} is {wide} pixels too wide"
            if self.pictures:
                self.page.photograph(Path(self.pictures) / f"{name}{suffix}.png")
        self.page.set_view(1200)


@pytest.fixture
def operator(browser):  # noqa: F811
    with contextlib.ExitStack() as parts:
        folder = Path(tempfile.mkdtemp(prefix="eks"))  # short: a Unix socket's path has 107 bytes
        parts.callback(shutil.rmtree, folder, ignore_errors=True)
        site = Site(parts, folder)
        page = browser.new_page()
        parts.callback(page.close)
        page.set_view(1200)
        yield Operator(page, site, os.environ.get("EDGEKIT_PICTURES"))


def test_operator_sees_good_bad_and_cut_releases_through(operator):
    page, site = operator.page, operator.site
    setup = site.setup
    wait_for(lambda: site.count_online() == 21, "21 devices", 40)
    operator.enter()

    # The first version goes to all at once.
    site.release(setup.first)
    operator.plan(setup.first.version, waves="100%", minimum="21")
    assert page.find("button", "Start: 21 of 21 devices first")
    operator.start()
    operator.watch("succeeded")
    site.application.start()

    # A good one goes out in waves, tried beside the first on each device.
    site.release(setup.good)
    operator.plan(setup.good.version, waves="10%,25%,50%,100%", trial="shadow", picture="plan")
    operator.start()
    page.wait(".waves .counts", "succeeded", 40)
    operator.photograph("rollout-live")
    page.run("window.isSame = true")
    operator.watch("succeeded")

    # A bad one stops by itself, and says why.
    site.release(setup.bad)
    operator.plan(setup.bad.version, waves="10%,25%,50%,100%", trial="shadow")
    bad = operator.start(find_name(setup.bad.version, FIRST))
    operator.watch("aborted")
    assert "stopped, and" in page.text(".lead")
    assert "This stopped it." in page.text(".gate.stops")
    assert page.find(".gate.stops svg.chart")
    assert page.find(".reasons a", "real")  # its own trial had refused it before
    wait_for(lambda: site.count(setup.good.version) == 21, "the way back", 30)
    operator.photograph("rollout-stopped")

    # The network of some is cut; the next release waits for them, and for a person.
    last = find_name(setup.last.version, CUT)
    cut = order_of(last)[CUT]
    site.cut(cut)
    wait_for(lambda: site.count_online() == 13, "the cut to show", 30)
    site.release(setup.last)
    operator.plan(setup.last.version, waves="50%,100%", approval="first")
    operator.start(last)
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
    page.wait(".problem", f"write the rollout's name: {last}")
    page.type("#confirm", last)
    page.type("#note", "we changed our minds")
    operator.photograph("rollout-back")
    page.click(".orders button", "Roll back")
    page.run("window.isSame = true")
    operator.watch("aborted")
    wait_for(lambda: site.count(setup.good.version) == 21, "the way back", 40)
    assert page.find(".timeline p", "ordered the way back: we changed our minds")

    # What is left to see.
    for name, path in {
        "fleet": "/",
        "rollouts": "/rollouts",
        "releases": "/releases",
        "health": "/health",
    }.items():
        page.open(operator.address + path)
        operator.photograph(name)
    page.open(f"{operator.address}/releases/{setup.last.version}/withdraw")
    page.type("#confirm", setup.last.version)
    page.click(".orders button", "Withdraw")
    page.wait(".notice", "is withdrawn")

    site.application.close()
    assert site.application.calls > 100
    assert site.application.failed == 0
    # Nothing was blocked, nothing failed in a script; the browser notes that a confirmation was refused.
    assert [one for one in page.messages if "422" not in one] == []
    found = {one.name: one for one in rollouts.list_rollouts(site.fleet.store)}
    assert [rollouts.replay_rollout(site.fleet.store, name) for name in found] == [[]] * 4
    assert found[bad].state == found[last].state == "aborted"
