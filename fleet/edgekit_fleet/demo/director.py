"""Runs the demo: 21 devices, a good release, a bad release that is stopped, and a network failure.

This module prints nothing. It gets finished packages and reports each step to its caller. The manager, the
broker, the web server, the certificates and one device are real. The other devices are simulated with the
accuracy and agreement that were measured for the packages.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from edgekit_fleet.demo.network import Network
from edgekit_fleet.demo.real_device import Application, RealDevice
from edgekit_fleet.demo.running_manager import running_manager
from edgekit_fleet.operations import devices, releases, rollouts
from edgekit_fleet.operations.running import RunningFleet
from edgekit_fleet.rollouts.waves import default_minimum, freeze_cohort
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.enrolment import enrol_simulated, read_access
from edgekit_fleet.simulation.simulated_fleet import SimulatedFleet
from edgekit_runtime.errors import TransportError
from edgekit_runtime.trust.trust_store import TrustStore

MODEL: Final = "clouds"
TARGET: Final = "x86-64"
REAL: Final = "real"
SIMULATED: Final = tuple(f"sim-{number:02}" for number in range(1, 21))
_DEVICES: Final = (REAL, *SIMULATED)
_ACTOR: Final = "demo"
_WAVES: Final = "10%,25%,50%,100%"
_CUT: Final = 8  # devices
_LIMIT_S: Final = 60.0  # without any news
_POLL_S: Final = 0.25
_SERVERS: Final = "127.0.0.1"
_NEAR: Final = "127.0.0.2"  # where the real device finds them: behind a network that can be cut
_SIMULATED: Final = DeviceBehaviour(figures_s=1.0, trial_s=1.0, requests_per_s=100.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoVersion:
    """A version of the model.

    Attributes:
        path: The package of the version.
        accuracy: The measured share of right answers.
        agreement: The measured share of inputs with the same class as in the first version.
    """

    version: str
    path: Path
    accuracy: float
    agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSetup:
    """The inputs of the demo.

    Attributes:
        folder: The folder for all files of the demo.
        home: The configuration folder. Its subfolder `keys` contains the key that signed the packages.
        calls: The path of an .npz file with inputs and their true `classes`, for the application on the real
            device.
        first, good, bad, last: The versions, in the order of their release.
    """

    folder: Path
    home: Path
    calls: Path
    first: DemoVersion
    good: DemoVersion
    bad: DemoVersion
    last: DemoVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoStep:
    """A completed step of the demo.

    Attributes:
        at_s: The end of the step, in seconds since the start of the demo.
        took_s: The duration of the step in seconds.
        what: A short description of the step.
        why: The reason, in a sentence with figures.
    """

    at_s: float
    took_s: float
    what: str
    why: str


def run_demo(setup: DemoSetup, begin_s: float, on_step: Callable[[DemoStep], None]) -> None:
    """Run the demo. All its processes have ended when this returns.

    `begin_s` is the start of the demo on the monotonic clock.

    Raises:
        EdgekitError: mosquitto is missing, a process ended, or a step took too long.
    """
    with contextlib.ExitStack() as parts:
        course = _Course(setup, begin_s, on_step)
        with course.step() as done:
            fleet = parts.enter_context(
                running_manager(setup.folder / "fleet", setup.home, (_NEAR, _SERVERS))
            )
            done("the fleet is up", "manager, mosquitto with TLS, and packages over HTTPS, on this machine")
        ports = (fleet.settings.broker_port, fleet.settings.web_port)
        network = parts.enter_context(Network(_NEAR, _SERVERS, ports))
        device = RealDevice(setup.folder / "real", MODEL, TARGET)
        parts.callback(device.close)
        application = Application(device.socket_path, MODEL, setup.calls)
        parts.callback(application.close)
        with course.step() as done:
            simulated = parts.enter_context(_join(fleet, setup, device))
            course.follow(fleet, device)
            course.wait_online()
            done(
                f"{len(_DEVICES)} devices are online",
                f"{len(SIMULATED)} simulated, and one real with service and agent as processes; each has a"
                " certificate of its own",
            )
        course.install_first(application)
        course.roll_out_good()
        course.roll_out_bad()
        course.cut_network(network, simulated)
        course.sum_up(application)


def _join(fleet: RunningFleet, setup: DemoSetup, device: RealDevice) -> SimulatedFleet:
    """Enrol all devices, start the real one, and return the simulated ones."""
    names = (REAL,)
    code = devices.invite(fleet.store, fleet.settings, fleet.authority, names, actor=_ACTOR, target=TARGET)[
        0
    ].code
    device.join(code)
    members = enrol_simulated(
        fleet.store, fleet.authority, SIMULATED, setup.folder / "simulated", target=TARGET
    )
    versions = {
        package.version: VersionBehaviour(agreement=package.agreement)
        for package in (setup.first, setup.good, setup.bad, setup.last)
    }
    behaviours = dict.fromkeys(SIMULATED, _SIMULATED)
    return SimulatedFleet(
        members, read_access(fleet.folder, fleet.settings), behaviours=behaviours, versions=versions
    )


def wait_while_moving(
    is_so: Callable[[], bool], look: Callable[[], str], clock: Callable[[], float] = time.monotonic
) -> str | None:
    """Wait until a condition is true, as long as the state changes.

    Args:
        is_so: Returns whether the condition is true.
        look: Returns the current state.
        clock: Returns the time in seconds.

    Returns:
        None if the condition is true, or the last state if there was no new state for a minute.
    """
    states: set[str] = set()
    limit_s = 0.0
    while not is_so():
        state = look()
        if state not in states:
            states.add(state)
            limit_s = clock() + _LIMIT_S
        elif clock() > limit_s:
            return state
        time.sleep(_POLL_S)
    return None


class _Course:
    """A running demo."""

    def __init__(self, setup: DemoSetup, begin_s: float, on_step: Callable[[DemoStep], None]) -> None:
        self._setup, self._begin_s, self._on_step = setup, begin_s, on_step

    def follow(self, fleet: RunningFleet, device: RealDevice) -> None:
        self._fleet, self._store, self._device = fleet, fleet.store, device

    @contextlib.contextmanager
    def step(self) -> Iterator[Callable[[str, str], None]]:
        """Measure the time of a step. The yielded function reports the step."""
        step_s = time.monotonic()

        def done(step: str, why: str) -> None:
            now_s = time.monotonic()
            self._on_step(DemoStep(at_s=now_s - self._begin_s, took_s=now_s - step_s, what=step, why=why))

        yield done

    def wait(self, condition: str, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so` returns True, as long as devices or rollouts reach new states.

        Raises:
            TransportError: There was no new state for a minute, or a process of the real device ended.
        """

        def look() -> str:
            self._device.check()
            fleet = [f"{device.name} {device.status} {dict(device.models)}" for device in self._list()]
            running = [
                f"{rollout.name} {rollout.state} {dict(rollout.members)}"
                for rollout in rollouts.list_rollouts(self._store)
            ]
            return "; ".join(fleet + running)

        if (state := wait_while_moving(is_so, look)) is not None:
            raise TransportError(f"nothing moved for {_LIMIT_S:.0f} s on the way to {condition}: {state}")

    def wait_online(self) -> None:
        """Wait until all devices are online."""
        self.wait("devices to be online", lambda: len(self._list_online()) == len(_DEVICES))

    def install_first(self, application: Application) -> None:
        """Bring the first version to all at once, and let the application call."""
        first = self._setup.first
        with self.step() as done:
            name = _find_name(first.version)
            self._start(first, name, waves="100%", minimum=len(_DEVICES))
            self._wait_end(name, "succeeded")
            self.wait(f"{first.version} everywhere", lambda: self._all_run(first.version))
            application.start()
            done(
                f"all run {first.version}",
                f"the first release goes to all at once: there is nothing to protect yet; it is right on"
                f" {first.accuracy:.1%} of the calls",
            )

    def roll_out_good(self) -> None:
        """Bring a good version out in waves."""
        good = self._setup.good
        with self.step() as done:
            name = _find_name(good.version)
            self._start(good, name, waves=_WAVES, trial="shadow")
            self._wait_end(name, "succeeded")
            self.wait(f"{good.version} everywhere", lambda: self._all_run(good.version))
            waves = ", ".join(map(str, rollouts.find_rollout(self._store, name).waves))
            done(
                f"good release {good.version}: on all {len(_DEVICES)} devices",
                f"in waves of {waves}; each device tried it on copies of calls beside"
                f" {self._setup.first.version} before it switched, and nothing was shown against it",
            )

    def roll_out_bad(self) -> None:
        """Bring a bad version out, and watch it stop."""
        bad, good = self._setup.bad, self._setup.good
        with self.step() as done:
            name = _find_name(bad.version)
            self._start(bad, name, waves=_WAVES, trial="shadow")
            self._wait_end(name, "returning", "aborted")
            verdict_s = time.monotonic()
            summary = rollouts.find_rollout(self._store, name)
            had = summary.members.get("returning", 0) + summary.members.get("returned", 0)
            reason = summary.because.partition("go back: ")[2] or summary.because
            done(
                f"bad release {bad.version}: stopped by itself after {had} of {len(_DEVICES)} devices",
                f"{reason} (it is right on {bad.accuracy:.1%} of the calls; nobody told the manager)",
            )
        with self.step() as done:
            done("the real device had refused it before", self._find_rejection(bad.version))
        with self.step() as done:
            self.wait(f"{good.version} everywhere", lambda: self._all_run(good.version))
            done(
                f"all are back on {good.version}",
                f"{time.monotonic() - verdict_s:.1f} s after the verdict; {len(_DEVICES) - had} devices never"
                f" saw {bad.version}",
            )

    def cut_network(self, network: Network, simulated: SimulatedFleet) -> None:
        """Cut the network of some devices during a rollout."""
        last = self._setup.last
        name = _find_name(last.version, is_real_first=False)
        cut = _order(name)[-_CUT:]
        with self.step() as done:
            network.cut()
            simulated.cut(set(cut) - {REAL})
            self.wait("the cut to show", lambda: len(self._list_online()) == len(_DEVICES) - _CUT)
            done(
                f"network cut: {_CUT} devices are gone, the real one among them",
                "their connections broke, and the broker announced it by their last wills",
            )
        with self.step() as done:
            self._start(last, name, waves=_WAVES, trial="shadow")
            connected = len(_DEVICES) - _CUT
            self.wait(
                f"{connected} devices with {last.version}", lambda: self._count(last.version) == connected
            )
            summary = rollouts.find_rollout(self._store, name)
            done(
                f"release {last.version} goes out meanwhile: {connected} devices run it",
                f"and the rollout waits for the others: {summary.because}",
            )
        with self.step() as done:
            network.restore()
            simulated.restore(set(cut) - {REAL})
            self._wait_end(name, "succeeded")
            self.wait(f"{last.version} everywhere", lambda: self._all_run(last.version))
            done(
                f"network back: all {len(_DEVICES)} devices run {last.version}",
                "each reconnected after a random pause, said which document it holds, and got the newer one",
            )

    def sum_up(self, application: Application) -> None:
        """Report what the application on the real device saw."""
        with self.step() as done:
            application.close()
            differences = len(
                [
                    difference
                    for rollout in rollouts.list_rollouts(self._store)
                    for difference in rollouts.replay_rollout(self._store, rollout.name)
                ]
            )
            answered = max(application.calls - application.failed, 1)
            done(
                f"the application on the real device: {application.calls} calls, {application.failed} failed",
                f"{application.right / answered:.1%} of the answers were right over all four releases;"
                f" decided again from the audit log, {differences} decisions differ",
            )

    # What it is made of

    def _start(
        self,
        version: DemoVersion,
        name: str,
        *,
        waves: str,
        minimum: int | None = None,
        trial: Literal["none", "shadow"] = "none",
    ) -> None:
        """Release a version, and start its rollout to all devices."""
        keys = TrustStore.from_folder(self._setup.home / "keys")
        releases.make_release(
            self._fleet.folder, self._store, keys, [version.path], actor=_ACTOR, name=version.version
        )
        request = rollouts.StartRollout(
            release=version.version,
            selector="all",
            waves=waves,
            minimum=minimum,
            name=name,
            trial=trial,
            soak_s=1.0,
        )
        rollouts.start_rollout(self._store, request, _ACTOR)

    def _wait_end(self, name: str, *states: str) -> None:
        ended = ("succeeded", "aborted", "paused", *states)
        self.wait(f"rollout {name}", lambda: rollouts.find_rollout(self._store, name).state in ended)
        rollout = rollouts.find_rollout(self._store, name)
        if rollout.state not in states:
            expected = " or ".join(states)
            raise TransportError(f"rollout {name} is {rollout.state}, expected {expected}: {rollout.because}")

    def _find_rejection(self, version: str) -> str:
        for execution in devices.describe(self._store, REAL).executions:
            if execution["version"] == version and execution["state"] == "failed":
                reason = execution["reason"]
                return f"its own trial on copies of calls: {reason}; no application got an answer of it"
        raise TransportError(f"the real device did not refuse {version}")

    def _list(self) -> Sequence[devices.DeviceSummary]:
        return devices.page_devices(self._store, "all")[0]

    def _list_online(self) -> list[str]:
        return [device.name for device in self._list() if device.is_online]

    def _count(self, version: str) -> int:
        return sum(device.models.get(MODEL) == version for device in self._list())

    def _all_run(self, version: str) -> bool:
        return all(
            device.models.get(MODEL) == version and device.status == "converged" for device in self._list()
        )


def _find_name(version: str, *, is_real_first: bool = True) -> str:
    """Return a name of a rollout with the real device in the first step, or among the last devices.

    The name decides the order, so the audience need not wait for chance.
    """
    minimum = default_minimum(len(_DEVICES))
    for number in itertools.count(1):
        order = _order(name := f"{version}-{number}")
        if REAL in (order[:minimum] if is_real_first else order[-_CUT:]):
            return name
    raise AssertionError("unreachable")


def _order(rollout: str) -> tuple[str, ...]:
    return freeze_cohort(rollout, dict.fromkeys(_DEVICES, TARGET))
