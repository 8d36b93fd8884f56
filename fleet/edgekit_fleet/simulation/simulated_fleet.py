"""Runs simulated devices on one asyncio event loop in a separate thread.

In this example, version 2.0.0 crashes on all devices.

    members = enrol_simulated(store, authority, [f"sim-{n:03}" for n in range(50)], folder)
    access = read_access(fleet_folder, settings)
    with SimulatedFleet(members, access, versions={"2.0.0": VersionBehaviour(crashes=1.0)}) as fleet:
        fleet.wait_until(lambda device: device.is_online, 20)
"""

import asyncio
import contextlib
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Final

from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.simulated_device import FleetAccess, SimulatedDevice, SimulatedMember
from edgekit_runtime.errors import TransportError

if TYPE_CHECKING:
    from typing_extensions import Self

_PING_S: Final = 300.0
_END_S: Final = 10.0
_CONNECTS_A_SECOND: Final = 250.0  # as the manager spreads reconnects
_POLL_S: Final = 0.05
_SHARE_OF_TURN_S: Final = 0.005  # per turn of the loop, for the work of devices


class SimulatedFleet:
    """Devices that connect at the start of a `with` block and are switched off at its end.

    Any thread may call the methods, which read the current state of the devices.

    Attributes:
        versions: The behaviour of each version, which may be changed at any time.
    """

    def __init__(
        self,
        members: Sequence[SimulatedMember],
        access: FleetAccess,
        *,
        behaviours: Mapping[str, DeviceBehaviour] | None = None,
        versions: Mapping[str, VersionBehaviour] | None = None,
        connect_within_s: float | None = None,
    ) -> None:
        """Prepare the devices.

        Args:
            members: The enrolled devices, see `enrol_simulated`.
            access: The access data of the fleet, see `read_access`.
            behaviours: The behaviour of each device, by default good.
            versions: The behaviour of each version, by default good.
            connect_within_s: The time in which all devices connect, or None for a time that a broker can
                handle.
        """
        allow_many_files(len(members) + 100)
        self.versions = dict(versions or {})
        self._within_s = len(members) / _CONNECTS_A_SECOND if connect_within_s is None else connect_within_s
        self._work: deque[Callable[[], None]] = deque()
        self._is_working = False
        chosen, good = behaviours or {}, DeviceBehaviour()
        self.devices = {
            member.device: SimulatedDevice(
                member, access, chosen.get(member.device, good), self.versions, self._later
            )
            for member in members
        }
        self._thread = threading.Thread(target=self._run, name="edgekit-simulation", daemon=True)
        self._started = threading.Event()

    def __enter__(self) -> "Self":
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30.0)

    # What happens to devices

    def cut(self, names: Iterable[str] | None = None) -> None:
        """Cut the network of some devices, or of all devices if `names` is None."""
        self._each(names, SimulatedDevice.cut)

    def restore(self, names: Iterable[str] | None = None, within_s: float | None = None) -> None:
        """Restore the network of some devices, or of all devices if `names` is None.

        The devices connect within `within_s` seconds.
        """
        wait_s = self._within_s if within_s is None else within_s
        self._each(names, lambda device: device.restore(wait_s))

    def drop(self, names: Iterable[str] | None = None) -> None:
        """Break the connections of some devices, or of all devices if `names` is None.

        The devices reconnect within the time that the manager sets.
        """
        self._each(names, lambda device: device.link.drop())

    def reboot(self, names: Iterable[str] | None = None) -> None:
        """Reboot some devices, or all devices if `names` is None."""
        self._each(names, SimulatedDevice.reboot)

    def send_event(self, text: str, names: Iterable[str] | None = None) -> None:
        """Send an event with this text from some devices, or from all devices if `names` is None."""
        self._each(names, lambda device: device.send_event(text))

    # What devices state

    def count(self, holds: Callable[[SimulatedDevice], bool]) -> int:
        """Return the number of devices for which `holds` returns True."""
        return sum(map(holds, self.devices.values()))

    def wait_until(
        self, holds: Callable[[SimulatedDevice], bool], limit_s: float, *, devices: int | None = None
    ) -> float:
        """Wait until a condition is true for enough devices. Return the waiting time in seconds.

        Args:
            holds: Returns whether the condition is true for a device.
            limit_s: The maximum waiting time in seconds.
            devices: The number of devices that is enough, by default all.

        Raises:
            TransportError: The condition was not true for enough devices within `limit_s`.
        """
        begin_s, expected = time.monotonic(), len(self.devices) if devices is None else devices
        # The search for the first that is not there takes little of the time of the devices' thread.
        while not all(map(holds, self.devices.values())) and (devices is None or self.count(holds) < devices):
            if time.monotonic() - begin_s > limit_s:
                count = self.count(holds)
                raise TransportError(f"{count} of {expected} simulated devices are there after {limit_s:g} s")
            time.sleep(_POLL_S)
        return time.monotonic() - begin_s

    # The loop

    def _each(self, names: Iterable[str] | None, act: Callable[[SimulatedDevice], None]) -> None:
        chosen = self.devices if names is None else names

        async def on_loop() -> None:
            for name in chosen:
                act(self.devices[name])

        asyncio.run_coroutine_threadsafe(on_loop(), self._loop).result()

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        for device in self.devices.values():
            device.start(self._within_s)
        self._started.set()
        while not self._stop.is_set():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), _PING_S)
            for device in self.devices.values():
                device.link.ping()
        for device in self.devices.values():
            device.stop()
        ends = [device.link.wait_ended() for device in self.devices.values()]
        # A broker may not answer while a connection is opened.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*ends), _END_S)

    def _later(self, work: Callable[[], None]) -> None:
        """Run work of a device after all received messages were handled."""
        self._work.append(work)
        if not self._is_working:
            self._is_working = True
            self._loop.call_soon(self._do_work)

    def _do_work(self) -> None:
        until_s = time.monotonic() + _SHARE_OF_TURN_S
        while self._work and time.monotonic() < until_s:
            self._work.popleft()()
        self._is_working = bool(self._work)
        if self._work:
            self._loop.call_soon(self._do_work)


def allow_many_files(file_count: int) -> None:
    """Raise the process's limit of open files to `file_count` if it is lower.

    Raises:
        TransportError: The system does not allow so many files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= file_count or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < file_count:
        raise TransportError(f"{file_count} open files are needed, the system allows {hard}; see ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_count, hard))
