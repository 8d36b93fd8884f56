"""A simulated device, which makes decisions and signs documents with the code of the real agent.

Slots, downloads, self-tests and the service are simulated, and timers replace everything that takes time. The
state that survives a reboot is the same as in the agent's journal. All code runs on the thread of the event
loop.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_fleet.simulation.simulated_link import DeviceCounts, SimulatedLink
from edgekit_fleet.simulation.simulated_slots import SimulatedSlots
from edgekit_runtime import __version__
from edgekit_runtime.agent.conditions import DeviceConditions
from edgekit_runtime.agent.documents import (
    Desired,
    DesiredModel,
    Event,
    Execution,
    Reported,
)
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.membership import make_context
from edgekit_runtime.agent.reconcile import NextSteps, Step, accept_desired, count_time, reconcile
from edgekit_runtime.agent.signing import UnknownKeyError, unseal
from edgekit_runtime.agent.trusted_time import TrustedTime
from edgekit_runtime.errors import SignatureError

_REPORT_S: Final = 0.25  # least time between two reports, as the agent's
_WAIT_S: Final = 1.0  # between looks while an execution waits


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMember:
    """An enrolled device.

    Attributes:
        pem: The path of the file with the certificate and the private key.
    """

    device: str
    target: str
    pem: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAccess:
    """The access data that all devices of a fleet share.

    Attributes:
        brokers: The host and port of each broker node. Devices try them in turn.
        authority: The certificate of the authority in PEM.
        manager_keys: The keys of the manager by key id, from the TUF root that devices start with.
        read_manager_keys: A function that returns the keys from the newest TUF root. Simulated devices call
            it instead of a TUF refresh.
    """

    brokers: tuple[tuple[str, int], ...]
    authority: str
    manager_keys: Mapping[str, Ed25519PublicKey]
    read_manager_keys: Callable[[], Mapping[str, Ed25519PublicKey]]


@dataclass(slots=True)
class _LastReport:
    """The last report.

    Its content is None if the broker may not have it. `at_s` is its time by the monotonic clock.
    """

    content: object = None
    at_s: float = 0.0
    sequence: int = 0


class SimulatedDevice:
    """A simulated device, which decides with the functions of the real agent. `start` switches it on.

    Attributes:
        behaviour: See `DeviceBehaviour`. It may be replaced at any time.
        counts: See `DeviceCounts`.
        desired: The newest accepted document, or None.
        arrived_at: When `desired` arrived, by the monotonic clock.
        status, because: The last status and its reason.
    """

    def __init__(
        self,
        member: SimulatedMember,
        access: FleetAccess,
        behaviour: DeviceBehaviour,
        versions: Mapping[str, VersionBehaviour],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Read the key and certificate of the device. `start` connects it.

        Args:
            member: The enrolled device.
            access: The access data of the fleet.
            behaviour: The behaviour of the device.
            versions: The behaviour of each version. The mapping may change later.
            later: A function that runs a call after the messages received so far.
        """
        self.name, self.behaviour, self.counts = member.device, behaviour, DeviceCounts()
        self.desired: Desired | None = None
        self.arrived_at = 0.0
        self.status, self.because = "stale", ""
        self.is_cut, self._is_off = False, True
        self._access, self._later, self._target = access, later, member.target
        key = load_pem_private_key(member.pem.read_bytes(), None)
        if not isinstance(key, Ed25519PrivateKey):
            raise SignatureError(f"{member.pem}: is no Ed25519 key")
        self._draw = random.Random(member.device)  # noqa: S311  # no secret
        self.link = SimulatedLink(
            self, access.brokers, make_context(access.authority, str(member.pem)), key, self._draw
        )
        self.slots = SimulatedSlots(member.device, versions, self._draw)
        self._manager_keys = access.manager_keys
        self._time = TrustedTime(clock=lambda: time.time() + self.behaviour.clock_s)
        self._executions: tuple[Progress, ...] = ()
        self._counted_at = time.monotonic()
        self._step: tuple[Step, asyncio.TimerHandle, float] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reporting: asyncio.TimerHandle | None = None
        self._last = _LastReport()

    # Power and network

    @property
    def is_online(self) -> bool:
        """Whether the device has sent its hello on the current connection."""
        return self.link.is_online

    @property
    def versions(self) -> dict[str, str]:
        """The version that runs for each model."""
        return self.slots.versions

    def start(self, within_s: float) -> None:
        """Switch the device on. It connects after a random delay of up to `within_s` seconds."""
        self._is_off = False
        self._open_link(within_s)
        for model, manifest_sha256 in self.slots.list_unproven():  # the service proves it again
            confirm_s = self.behaviour.confirm_s
            asyncio.get_running_loop().call_later(confirm_s, self._judge, model, manifest_sha256)
        if self.behaviour.reboot_s is not None:
            wait_s = self._draw.expovariate(1 / self.behaviour.reboot_s)
            asyncio.get_running_loop().call_later(wait_s, self.reboot)

    def stop(self) -> None:
        """Switch the device off."""
        self._is_off = True
        self._end_step()
        for timer in (self._timer, self._reporting):
            if timer is not None:
                timer.cancel()
        self.link.close("off")

    def reboot(self) -> None:
        """Switch the device off, even during a step, and on again after `boot_s`. Do nothing if it is off."""
        if self._is_off:
            return
        self.stop()
        self._executions = count_time(self._executions, 60.0)  # as the agent adds what it may have lost
        self.slots.reboot()
        asyncio.get_running_loop().call_later(self.behaviour.boot_s, self.start, 0.5)

    def cut(self) -> None:
        """Cut the network. A download is interrupted and continues after `restore`."""
        self.is_cut = True
        if self._step is not None and self._step[0].action == "download":
            self._end_step()
        self.link.close("cut")

    def restore(self, within_s: float) -> None:
        """Restore the network. A device that is on reconnects after a random delay of up to `within_s`."""
        self.is_cut = False
        self._open_link(within_s)

    def _open_link(self, within_s: float) -> None:
        if not (self._is_off or self.is_cut):
            self.link.open(within_s)

    def send_event(self, text: str) -> None:
        """Send an event with this text to the manager. Do nothing if the device is offline."""
        sequence = self.link.next_sequence()
        event = Event(device=self.name, sequence=sequence, kind="simulated", text=text, at=time.time())
        self.link.send("event", event)

    # As a `LinkOwner`

    @property
    def reconnect_s(self) -> float:
        return 30.0 if self.desired is None else self.desired.reconnect_s

    @property
    def stated_versions(self) -> tuple[int, int]:
        return 0 if self.desired is None else self.desired.version, self._last.sequence

    def said_hello(self) -> None:
        self._later(self.tick)

    def take_desired(self, payload: bytes, at_s: float) -> None:
        self._later(partial(self._take_desired, payload, at_s))

    def lose_report(self) -> None:
        self._last.content = None

    # What is decided, by the agent's own functions

    def _unseal(self, payload: bytes) -> Desired:
        with contextlib.suppress(UnknownKeyError):
            return unseal(payload, "desired", Desired, self._manager_keys, "desired")
        self._manager_keys = self._access.read_manager_keys()
        return unseal(payload, "desired", Desired, self._manager_keys, "desired")

    def _take_desired(self, payload: bytes, at_s: float) -> None:
        if self._is_off:
            return
        try:
            desired = self._unseal(payload)
            if not accept_desired(desired, self.desired, self.name):
                return
        except SignatureError:
            self.counts.refused += 1
            return
        self.desired, self.arrived_at = desired, at_s
        self._time.note(desired.issued_at)
        self._last.content = None  # the manager waits for a report that names the version
        self.tick()

    def tick(self) -> None:
        """Decide on the next step, begin it, and send a report."""
        if self._is_off:
            return
        now_s = time.monotonic()
        self._executions = count_time(self._executions, now_s - self._counted_at)
        self._counted_at = now_s
        plan = reconcile(self.desired, self._executions, self.slots.view(), self._measure())
        self._executions = plan.executions
        self.status, self.because = plan.status, plan.because
        active = {step.desired_model.execution for step in plan.steps if step.desired_model is not None}
        if self._step is not None and self._step[0].action == "download":
            step = self._step[0]
            if step.desired_model is not None and step.desired_model.execution not in active:
                self._end_step()
        if plan.steps and self._step is None and not (self.is_cut and plan.steps[0].action == "download"):
            self._begin(plan.steps[0])
        self._report(plan)
        is_waiting = any(not execution.has_ended for execution in self._executions) and self._step is None
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if is_waiting:
            self._timer = asyncio.get_running_loop().call_later(_WAIT_S, self.tick)

    def _measure(self) -> DeviceConditions:
        local = time.gmtime(self._time.now_s)
        return DeviceConditions(
            now_s=self._time.now_s,
            minute_of_day=None if self._time.is_clock_behind else local.tm_hour * 60 + local.tm_min,
            free_bytes=self.behaviour.free_bytes,
            downloaded=frozenset(self.slots.downloaded),
        )

    # What is done, by timers

    def _begin(self, step: Step) -> None:
        behaviour, target = self.behaviour, step.desired_model
        wait_s = 0.05
        if step.action == "download" and target is not None:
            (progress,) = (
                progress_of_step
                for progress_of_step in self._executions
                if progress_of_step.report.execution == target.execution
            )
            wait_s = max(target.size_bytes - progress.report.done_bytes, 0) / max(behaviour.bytes_per_s, 1.0)
        elif step.action == "install":
            wait_s = behaviour.install_s
        timer = asyncio.get_running_loop().call_later(wait_s, self._finish, step)
        self._step = (step, timer, time.monotonic())

    def _end_step(self) -> None:
        """Interrupt a step, but keep the downloaded bytes."""
        if self._step is None:
            return
        step, timer, begun_at = self._step
        timer.cancel()
        self._step = None
        if step.action == "download" and step.desired_model is not None:
            received_bytes = int((time.monotonic() - begun_at) * self.behaviour.bytes_per_s)
            self._count_bytes(step.desired_model, received_bytes)

    def _count_bytes(self, target: DesiredModel, received_bytes: int) -> None:
        def add(report: Execution) -> Execution:
            came_bytes = min(received_bytes, target.size_bytes - report.done_bytes)
            done_bytes, sent_bytes = report.done_bytes + came_bytes, report.sent_bytes + came_bytes
            return replace(report, done_bytes=done_bytes, sent_bytes=sent_bytes)

        self._change(target.execution, lambda execution: replace(execution, report=add(execution.report)))

    def _change(self, execution: str, change: Callable[[Progress], Progress]) -> None:
        self._executions = tuple(
            change(progress) if progress.report.execution == execution else progress
            for progress in self._executions
        )

    def _finish(self, step: Step) -> None:
        self._step = None
        target = step.desired_model
        if step.action == "remove":
            self.slots.remove(step.model)
        elif step.action == "unload":
            self.slots.unload(step.model)
        elif target is not None and step.action == "download":
            self._count_bytes(target, target.size_bytes)
            self.slots.downloaded.add(target.sha256)
        elif target is not None and step.action == "install":
            self._install(target)
        elif target is not None:
            is_tried = self.slots.serve(target)
            wait_s = self.behaviour.trial_s if is_tried else self.behaviour.confirm_s
            asyncio.get_running_loop().call_later(wait_s, self._judge, step.model, target.manifest_sha256)
        self._later(self.tick)

    def _install(self, target: DesiredModel) -> None:
        if self.slots.install(target):
            self._change(target.execution, lambda execution: execution.enter("trying", code="load"))
            return
        reason = "the self-test gives other outputs than the package states"
        self._change(
            target.execution, lambda execution: execution.enter("failed", code="self-test", reason=reason)
        )

    def _judge(self, model: str, manifest_sha256: str) -> None:
        if not self._is_off and self.slots.judge(model, manifest_sha256):
            self._later(self.tick)

    # What is reported

    def _report(self, plan: NextSteps) -> None:
        if not self.is_online:
            return
        executions = tuple(execution.report for execution in plan.executions)
        content = (plan.status, plan.because, plan.models, executions)
        if self._reporting is not None:
            self._reporting.cancel()
            self._reporting = None
        loop, now_s = asyncio.get_running_loop(), time.monotonic()
        has_changed, has_models = content != self._last.content, bool(self.versions)
        due_s = self._last.at_s + (_REPORT_S if has_changed else self.behaviour.figures_s) - now_s
        if not has_changed and not has_models:
            return
        if due_s > 0:
            self._reporting = loop.call_later(due_s, self._later, self.tick)
            return
        reported = Reported(
            device=self.name,
            sequence=self.link.next_sequence(),
            desired_version=self.stated_versions[0],
            status=plan.status,
            because=plan.because,
            models=plan.models,
            executions=(*executions, *plan.superseded),
            figures=self.slots.count_figures(self.behaviour, now_s),
            facts={
                "target": self._target,
                "runtime": __version__,
                "free_bytes": str(self.behaviour.free_bytes),
                "clock": f"{time.time() + self.behaviour.clock_s:.0f}",
            },
        )
        # Before it is sent: a connection that is lost meanwhile clears the content again.
        self._last = _LastReport(content, now_s, reported.sequence)
        self.link.send("reported", reported)
        self.counts.reports += 1
        if has_models:
            self._reporting = loop.call_later(self.behaviour.figures_s, self._later, self.tick)
