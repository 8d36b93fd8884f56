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
from tests.chromium import browser  # noqa: F401  # a fixture
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
        self.application = Application(self.device.socket_path, MODEL, self.setup.calls)
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
        page.open(self.site.first_link)
        page.type("#name", "maria")
        page.type("#password", "a good long password")
        page.click("button", "Begin")
        page.wait("h1", "Fleet")
        page.click("nav a", "Settings")
        page.click("nav a", "Enrolment")
        page.type("#names", "real")
        page.type("#target", TARGET)
        page.click("button", "Make codes")
        self.site.device.join(page.text("code.secret").split()[-1])
        wait_for(lambda: self.site.count_online() == 21, "21 devices", 40)

    def release(self, version, *, picture=""):
        """Upload a package; it becomes a release that is named as its version."""
        page = self.page
        page.click("nav a", "Releases")
        page.click("a", "Make a release")
        page.choose_files("#packages", version.path)
        page.type("#name", version.version)
        page.type("#note", "from the browser")
        self.photograph(picture)
        page.click("button", "Make the release")
        page.wait(".notice", f"{version.version} is released")

    def plan(self, *, picture="", **fields):
        """Plan a rollout of the release whose page is open."""
        page = self.page
        page.click("a", "Plan a rollout")
        page.click("summary", "Trial, approval", leaves=False)
        for name, value in {"soak_min": "0.02", **fields}.items():
            (page.choose if name in ("trial", "approval") else page.type)(f"#{name}", value)
        page.click("button", "Show what would happen")
        page.wait("h2", "What would happen")
        self.photograph(picture)

    def start(self, name=""):
        if name:
            self.page.type("#name", name)
        self.page.click("button", "Start:")
        self.page.wait(".head .state")
        self.stay()
        return self.page.text("h1")

    def stay(self):
        self.page.run("window.isSame = true")  # gone with the next page

    def watch(self, state, limit_s=120.0):
        """Wait until the open page shows that state, by its own live updates."""
        self.page.wait(".head .state", state, limit_s)
        assert self.page.run("window.isSame === true")

    def press(self, button):
        self.page.click(".orders button", button)
        self.stay()

    def roll_out_first(self):
        """Bring the first version to all devices at once."""
        first = self.site.setup.first
        self.release(first)
        self.plan(waves="100%", minimum="21")
        assert self.page.find("button", "Start: 21 of 21 devices first")
        self.start()
        self.watch("succeeded")
        self.site.application.start()

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

    def check_end(self):
        # Nothing was blocked, nothing failed in a script; the browser notes that a confirmation was refused.
        assert [one for one in self.page.messages if "422" not in one] == []


@pytest.fixture
def operator(browser, mosquitto):  # noqa: F811
    with contextlib.ExitStack() as parts:
        folder = Path(tempfile.mkdtemp(prefix="eks"))  # short: a Unix socket's path has 107 bytes
        parts.callback(shutil.rmtree, folder, ignore_errors=True)
        site = Site(parts, folder)
        page = browser.new_page()
        parts.callback(page.close)
        page.set_view(1200)
        yield Operator(page, site)
