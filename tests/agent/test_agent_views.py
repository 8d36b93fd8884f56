"""What the agent reads of its models, and when."""

import queue
import shutil
import threading
import time

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.agent.parts import make_desired, make_enrolment, make_root, want
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_runtime.agent.agent import Agent
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.membership import Membership
from edgekit_runtime.agent.mqtt_link import LinkMessage
from edgekit_runtime.agent.signing import seal
from edgekit_runtime.slots import Slots


class Link:
    """Stands for the link to a broker, and brings one document."""

    def __init__(self, desired):
        self.received = queue.SimpleQueue()
        self.received.put(LinkMessage("desired", desired))
        self.will, self.reconnect_s, self.is_connected = b"", 1.0, True

    def start(self): ...
    def stop(self): ...
    def put(self, kind, payload, **_): ...


class HalfInstaller:
    """Carries a step out up to the moment at which the package lies there and no state names it."""

    def __init__(self, path, package):
        self.path, self.package = path, package
        self.is_written, self.goes_on = threading.Event(), threading.Event()

    def carry_out(self, order, stop, note, count):
        self.path.mkdir(mode=0o700, parents=True)
        shutil.copy(
            self.package, self.path / f"slot-1.0.0-{order.step.desired_model.manifest_sha256[:16]}.edgepkg"
        )
        self.is_written.set()
        self.goes_on.wait(20)
        return StepResult(outcome="failed", code="install", reason="the test ends it")


class CountingTrust:
    """Verifies as `trust` does, and counts the packages.

    Attributes:
        count: packages verified.
    """

    def __init__(self, trust):
        self._trust, self.count = trust, 0

    def verify(self, *arguments, **named):
        self.count += 1
        return self._trust.verify(*arguments, **named)


class SiteMembership(Membership):
    def make_context(self, trusted_time=None):
        return None


def test_package_whose_state_is_not_written_yet_is_not_read_by_the_agent(maker, tmp_path):  # noqa: F811
    package, trust = tmp_path / "linear.edgepkg", CountingTrust(maker.trust)
    maker.write(package, version="1.0.0")
    manager, key = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    wanted = want(
        model="linear",
        version="1.0.0",
        manifest_sha256=maker.manifest(version="1.0.0").sha256,
        size_bytes=package.stat().st_size,
    )
    now_s = time.time()
    desired = make_desired(wanted, issued_at=now_s, expires_at=now_s + 86_400.0)
    (tmp_path / "slots").mkdir(mode=0o700)
    half = HalfInstaller(tmp_path / "slots" / "models" / "linear", package)
    agent = Agent(
        SiteMembership(enrolment=make_enrolment(tuf_root=make_root(manager)), key=key, folder=tmp_path),
        tmp_path / "agent",
        Installer(Slots(tmp_path / "slots", trust, "x86-64"), tmp_path / "no-socket"),
        link=Link(seal(desired, "desired", manager)),
        carrier=half,
    )
    agent.connect()
    wait_for(lambda: agent.turn(0.01) and half.is_written.is_set(), "the package to be written")
    agent.turn(0.01)
    assert trust.count == 0
    half.goes_on.set()
    wait_for(lambda: agent.turn(0.01) and trust.count, "the package to be found after the step")
