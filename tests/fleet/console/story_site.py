"""A fleet as `edgekit fleet up` starts it, with devices, and an operator who does everything by clicking.

Broker, manager and console are those of the command, in its own process. One device with service, agent and
an application that calls is real, behind a network that can be cut; 20 devices are simulated. With
EDGEKIT_PICTURES=FOLDER the pictures of docs/guide/console.md are written there.
"""

import contextlib
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.browser import NO_SCROLL_BARS, list_messages, set_view
from tests.fleet.conftest import mosquitto  # noqa: F401  # a fixture
from tests.free_port import free_port
from tests.waiting import bounded, wait_for

from edgekit_cli.fleet.demo_packages import MODEL, TARGET, make_setup
from edgekit_fleet.demo.network import Network
from edgekit_fleet.demo.real_device import Application, RealDevice
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.operations import devices, rollouts
from edgekit_fleet.rollouts.waves import freeze_cohort
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet
from edgekit_fleet.store.fleet_folder import FleetFolder

ROOT = Path(__file__).resolve().parents[3]
SIMULATED = tuple(f"sim-{number:02}" for number in range(1, 21))
NEAR, SERVERS = "127.0.0.2", "127.0.0.1"  # the real device finds the fleet behind a network that can be cut
FAST = DeviceBehaviour(figures_s=1.0, trial_s=1.0, requests_per_s=100.0)
VIEWS = {"": (1200, "light"), "-dark": (1200, "dark"), "-phone": (390, "light")}


def order_of(rollout):
    return freeze_cohort(rollout, dict.fromkeys(("real", *SIMULATED), TARGET))


def find_name(version, some):
    """Return a name of a rollout with the real device among some of its order, which the name draws."""
    names = (f"{version}-try{number}" for number in itertools.count(1))
    return next(name for name in names if "real" in order_of(name)[some])


class Site:
    """A fleet that runs, and its devices."""

    def __init__(self, parts, folder):
        self.setup = make_setup(folder)
        self.ports = {name: free_port() for name in ("broker", "web", "console")}
        self.first_link = self._start(parts, folder)
        self.address = self.first_link.partition("/first")[0]
        self.folder = FleetFolder(folder / "fleet")
        self.store = self.folder.open_store()
        parts.callback(self.store.close)
        ports = self.ports["broker"], self.ports["web"]
        self.network = parts.enter_context(Network(NEAR, SERVERS, ports))
        self.device = RealDevice(folder / "real", MODEL, TARGET)
        parts.callback(self.device.close)
        self.application = Application(self.device.socket_path, MODEL, self.setup.calls, pause_s=0.02)
        parts.callback(self.application.close)
        self.simulated = parts.enter_context(self._simulate(folder))

    def _start(self, parts, folder):
        """Start `edgekit fleet up`; return the link for the first administrator that it prints."""
        ports = [text for name, port in self.ports.items() for text in (f"--{name}-port", str(port))]
        names = ["--name", NEAR, "--name", SERVERS]
        sources = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
        process = subprocess.Popen(
            [
                *(sys.executable, "-u", "-m", "edgekit_cli", "fleet", "up"),
                *("--folder", str(folder / "fleet"), *names, *ports),
            ],
            env={
                **os.environ,
                "EDGEKIT_HOME": str(self.setup.home),
                "PYTHONPATH": os.pathsep.join(str(ROOT / one) for one in sources),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        parts.enter_context(bounded(process))
        printed = []
        reader = threading.Thread(target=lambda: printed.extend(process.stdout), daemon=True)
        reader.start()

        def end():
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0, "".join(printed)
            reader.join(10)

        parts.callback(end)
        wait_for(lambda: "Ctrl-C" in "".join(printed) or process.poll() is not None, "the fleet", 60)
        found = re.search(r"first administrator, within an hour: (\S+)", "".join(printed))
        assert found is not None, "".join(printed)
        return found[1].replace(NEAR, SERVERS)

    def _simulate(self, folder):
        authority, settings = Authority(self.folder.identity), self.folder.read_settings()
        tags = {"site": "lyon"}
        members = enrol_simulated(
            self.store, authority, SIMULATED, folder / "simulated", target=TARGET, tags=tags
        )
        versions = (self.setup.first, self.setup.good, self.setup.bad, self.setup.last)
        return SimulatedFleet(
            members,
            read_access(self.folder, settings),
            behaviours=dict.fromkeys(SIMULATED, FAST),
            versions={one.version: VersionBehaviour(agreement=one.agreement) for one in versions},
        )

    def count(self, version):
        return sum(one.models.get(MODEL) == version for one in self._list())

    def count_online(self):
        return sum(one.is_online for one in self._list())

    def _list(self):
        found, following = devices.page_devices(self.store, "all")
        assert following is None
        return found

    def cut(self, names):
        self.network.cut()
        self.simulated.cut(set(names) - {"real"})

    def restore(self, names):
        self.network.restore()
        self.simulated.restore(set(names) - {"real"}, within_s=1.0)

    def check_end(self, states):
        """Check what must hold of any story: no call failed, and each decision comes again from its log."""
        self.application.close()
        assert self.application.calls > 100
        assert self.application.failed == 0
        found = rollouts.list_rollouts(self.store)
        assert [rollouts.replay_rollout(self.store, one.name) for one in found] == [[]] * len(found)
        assert [one.state for one in reversed(found)] == states


class Operator:
    """Somebody who works at the pages."""

    def __init__(self, page, site):
        self.page, self.site = page, site
        self.pictures = os.environ.get("EDGEKIT_PICTURES")

    def enter(self):
        """Make the first administrator, invite the real device, and wait for all."""
        page = self.page
        page.goto(self.site.first_link)
        page.fill("#name", "maria")
        page.fill("#password", "a good long password")
        self.click("button", "Begin")
        expect(page.locator("h1:visible")).to_contain_text("Fleet")
        self.click("nav a", "Settings")
        self.click("nav a", "Enrolment")
        page.fill("#names", "real")
        page.fill("#target", TARGET)
        self.click("button", "Make codes")
        self.site.device.join(page.inner_text("code.secret").split()[-1])
        wait_for(lambda: self.site.count_online() == 21, "21 devices", 40)

    def click(self, selector, text):
        """Click what leads to another page, or to this one again, and wait until that is loaded."""
        with self.page.expect_navigation():
            self.page.locator(selector, has_text=text).first.click()

    def release(self, version, *, picture=""):
        """Upload a package; it becomes a release that is named as its version."""
        page = self.page
        self.click("nav a", "Releases")
        self.click("a", "Make a release")
        page.set_input_files("#packages", version.path)
        page.fill("#name", version.version)
        page.fill("#note", "from the browser")
        self.photograph(picture)
        self.click("button", "Make the release")
        expect(page.locator(".notice:visible")).to_contain_text(f"{version.version} is released")

    def plan(self, *, picture="", **fields):
        """Plan a rollout of the release whose page is open."""
        page = self.page
        self.click("a", "Plan a rollout")
        page.locator("summary", has_text="Trial, approval").click()
        for name, value in {"soak_min": "0.02", **fields}.items():
            (page.select_option if name in ("trial", "approval") else page.fill)(f"#{name}", value)
        self.click("button", "Show what would happen")
        expect(page.locator("h2", has_text="What would happen")).to_be_visible()
        self.photograph(picture)

    def start(self, name=""):
        if name:
            self.page.fill("#name", name)
        self.click("button", "Start:")
        expect(self.page.locator(".head .state:visible")).to_be_visible()
        self.stay()
        return self.page.inner_text("h1")

    def stay(self):
        self.page.evaluate("window.isSame = true")  # gone with the next page

    def watch(self, state, limit_s=120.0):
        """Wait until the open page shows that state, by its own live updates."""
        expect(self.page.locator(".head .state:visible")).to_contain_text(state, timeout=1000 * limit_s)
        assert self.page.evaluate("window.isSame === true")

    def press(self, button):
        self.click(".orders button", button)
        self.stay()

    def roll_out_first(self):
        """Bring the first version to all devices at once."""
        first = self.site.setup.first
        self.release(first)
        self.plan(waves="100%", minimum="21")
        expect(self.page.locator("button", has_text="Start: 21 of 21 devices first")).to_be_visible()
        self.start()
        self.watch("succeeded")
        self.site.application.start()

    def photograph(self, name):
        if not name:
            return
        for suffix, (width, theme) in VIEWS.items():
            set_view(self.page, width, theme=theme)
            wide = self.page.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{name}{suffix} is {wide} pixels too wide"
            if self.pictures:
                path = Path(self.pictures) / f"{name}{suffix}.png"
                self.page.screenshot(path=path, full_page=True, style=NO_SCROLL_BARS)
        set_view(self.page, 1200)

    def check_end(self):
        # Nothing was blocked, nothing failed in a script; the browser notes that a confirmation was refused.
        assert [message for message in list_messages(self.page) if "422" not in message] == []


@pytest.fixture
def operator(page, mosquitto):  # noqa: F811
    with contextlib.ExitStack() as parts:
        folder = Path(tempfile.mkdtemp(prefix="eks"))  # short: a Unix socket's path has 107 bytes
        parts.callback(shutil.rmtree, folder, ignore_errors=True)
        site = Site(parts, folder)
        set_view(page, 1200)
        yield Operator(page, site)
