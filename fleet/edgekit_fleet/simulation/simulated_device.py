"""A simulated device: the agent's real decisions and signed documents; all that takes time is a timer.

Slots, downloads, self-tests and the service are simulated. State that must survive a reboot is kept as in the
agent's journal. All happens on the loop's thread.
"""

import asyncio
import contextlib
import hashlib
import random
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from edgekit_fleet.broker.mqtt_connection import ConnectionOptions, MqttConnection
from edgekit_fleet.simulation.behaviour import DeviceBehaviour, VersionBehaviour
from edgekit_runtime import __version__
from edgekit_runtime.agent.conditions import DeviceConditions, ModelView
from edgekit_runtime.agent.documents import (
    Desired,
    DesiredModel,
    Event,
    Execution,
    Hello,
    Kind,
    ModelFigures,
    Reported,
    topic,
)
from edgekit_runtime.agent.journal import Progress
from edgekit_runtime.agent.membership import LEAST_CLOCK_S, make_context
from edgekit_runtime.agent.reconcile import NextSteps, Step, accept_desired, count_time, reconcile
from edgekit_runtime.agent.signing import UnknownKeyError, seal, unseal
from edgekit_runtime.errors import SignatureError

_REPORT_S: Final = 0.25  # least time between two reports, as the agent's
_WAIT_S: Final = 1.0  # between looks while an execution waits


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMember:
    """A device that is enrolled.

    Attributes:
        pem: file with its certificate and its key.
    """

    device: str
    target: str
    pem: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAccess:
    """The access data that all devices of a fleet share.

    Attributes:
        brokers: host and port of the broker, or of each node of a cluster; tried in turn.
        authority: certificate of the authority, in PEM.
        manager_keys: key id -> key of the manager, as the first root of the devices names them.
        read_manager_keys: returns the same by the newest root. It stands for a refresh of the metadata, which
            simulated devices do not hold.
    """

    brokers: tuple[tuple[str, int], ...]
    authority: str
    manager_keys: Mapping[str, Ed25519PublicKey]
    read_manager_keys: Callable[[], Mapping[str, Ed25519PublicKey]]


@dataclass(slots=True)
class DeviceCounts:
    """Counts on a device.

    Attributes:
        connects, resumed: connections that were made, and those of them that resumed a TLS session.
        reports: number of reports that were sent.
    """

    connects: int = 0
    resumed: int = 0
    refused: int = 0
    reports: int = 0


@dataclass(slots=True, kw_only=True)
class _SimulatedModel:
    """A model in the simulated slots; the service runs `version` since `served_at` if it serves it."""

    version: str = ""
    manifest_sha256: str = ""
    health: str = "missing"
    previous: tuple[str, str] = ("", "")
    rejected: list[tuple[str, str]] = field(default_factory=list)
    served_at: float | None = None
    on_trial: str = ""
    remark: str = ""


class SimulatedDevice:
    """One device.

    Attributes:
        behaviour: see `DeviceBehaviour`; may be replaced at any time.
        counts: see `DeviceCounts`.
        desired: the newest accepted document, or None.
        arrived_at: when `desired` came, by the monotonic clock.
        status, because: status and reason, as last decided.
    """

    def __init__(
        self,
        member: SimulatedMember,
        access: FleetAccess,
        behaviour: DeviceBehaviour,
        versions: Mapping[str, VersionBehaviour],
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Read key and certificate; `start` connects.

        Args:
            member: the device.
            access: access to its fleet.
            behaviour: behaviour of the device.
            versions: version -> its behaviour; the mapping may change later.
            later: runs work of the device's own processor, after received messages were taken.
        """
        self.name, self.behaviour, self.counts = member.device, behaviour, DeviceCounts()
        self.desired: Desired | None = None
        self.arrived_at = 0.0
        self.status, self.because = "stale", ""
        self.is_cut = False
        self._access, self._versions, self._later, self._target = access, versions, later, member.target
        key = load_pem_private_key(member.pem.read_bytes(), None)
        if not isinstance(key, Ed25519PrivateKey):
            raise SignatureError(f"{member.pem}: is no Ed25519 key")
        self._key, self._manager_keys = key, access.manager_keys
        self._context = make_context(access.authority, str(member.pem))
        self._session: ssl.SSLSession | None = None
        self._draw = random.Random(member.device)  # noqa: S311  # no secret
        # As a new journal, so that documents of an earlier simulation are older.
        self._sequence = int(time.time() * 1000)
        self._presence = self._reported = self._ends = 0
        self._will_sha256 = ""
        self._known_s = 0.0
        self._executions: tuple[Progress, ...] = ()
        self._counted_at = time.monotonic()
        self._models: dict[str, _SimulatedModel] = {}
        self._downloaded: set[str] = set()
        self._connection: MqttConnection | None = None
        self._is_greeted = self._is_off = True
        self._step: tuple[Step, asyncio.TimerHandle, float] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reporting: asyncio.TimerHandle | None = None
        self._last: object = None
        self._reported_at = 0.0

    # The link

    @property
    def is_online(self) -> bool:
        """Return whether the device has said hello on a connection that stands."""
        return self._connection is not None and self._is_greeted

    @property
    def versions(self) -> dict[str, str]:
        """Return model -> version that the slots open."""
        return {name: model.version for name, model in self._models.items()}

    def start(self, within_s: float) -> None:
        """Switch the device on; it connects within this time."""
        self._is_off = False
        self._connect_within(within_s)
        for model in self._models.values():
            if model.served_at is not None and model.health == "unproven":  # its service proves it again
                confirm_s = self.behaviour.confirm_s
                asyncio.get_running_loop().call_later(confirm_s, self._judge, model, model.manifest_sha256)
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
        if self._connection is not None:
            self._connection.abort("off")

    def reboot(self) -> None:
        """Switch off, in the middle of any step, and on again."""
        if self._is_off:
            return
        self.stop()
        self._executions = count_time(self._executions, 60.0)  # as the agent adds what it may have lost
        for model in self._models.values():
            model.on_trial = ""
        asyncio.get_running_loop().call_later(self.behaviour.boot_s, self.start, 0.5)

    def cut(self) -> None:
        """Cut the network; a download goes on when it is back."""
        self.is_cut = True
        if self._step is not None and self._step[0].action == "download":
            self._end_step()
        self.drop()

    def restore(self, within_s: float) -> None:
        """Bring the network back."""
        self.is_cut = False
        self._connect_within(within_s)

    def drop(self) -> None:
        """Break the connection off."""
        if self._connection is not None:
            self._connection.abort("dropped")

    def send_event(self, text: str) -> None:
        """State that something happened, if the device is connected."""
        event = Event(
            device=self.name, sequence=self._next_sequence(), kind="simulated", text=text, at=time.time()
        )
        self._send("event", event)

    def ping(self) -> None:
        """Keep the connection."""
        if self.is_online and self._connection is not None:
            self._connection.ping()

    @property
    def _broker(self) -> tuple[str, int]:
        return self._access.brokers[self._ends % len(self._access.brokers)]

    def _connect_within(self, within_s: float) -> None:
        wait_s = self._draw.uniform(0.0, within_s)
        asyncio.get_running_loop().call_later(wait_s, self._begin_connection)

    def _begin_connection(self) -> None:
        if self._is_off or self.is_cut or self._connection is not None:
            return
        self._presence = self._next_sequence()
        will = Hello(device=self.name, sequence=self._presence, online=False, runtime=__version__)
        envelope = seal(will, "hello", self._key)
        self._will_sha256 = hashlib.sha256(envelope).hexdigest()
        options = ConnectionOptions(
            client_id=self.name,
            context=self._context,
            session=self._session,
            host=self._broker[0],
            topics=(topic(self.name, "desired"),),
            will_topic=topic(self.name, "hello"),
            will=envelope,
            is_mqtt5=self.behaviour.is_mqtt5,
        )
        connection = MqttConnection(options, self)
        self._connection, self._is_greeted = connection, False
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(lambda: connection, *self._broker)
        self._opening = loop.create_task(self._open(opening, connection))

    async def _open(self, opening: object, connection: MqttConnection) -> None:
        try:
            await opening  # type: ignore[misc]
        except OSError as error:
            self.closed(connection, str(error))

    def connected(self, connection: MqttConnection) -> None:
        """Say hello; see `ConnectionOwner`."""
        self._is_greeted = True
        self.counts.connects += 1
        self.counts.resumed += connection.is_resumed
        self._session = connection.session  # a copy, which costs as much as ten messages
        desired_version = 0 if self.desired is None else self.desired.version
        hello = Hello(
            device=self.name,
            sequence=self._presence,
            desired_version=desired_version,
            reported=self._reported,
            will_sha256=self._will_sha256,
            runtime=__version__,
        )
        self._send("hello", hello)
        self._later(self.tick)

    def received(self, connection: MqttConnection, name: str, payload: bytes, at_s: float) -> None:
        """Take a message; see `ConnectionOwner`."""
        if self._loses():
            connection.abort("lost")
            return
        if name == topic(self.name, "desired") and payload:
            self._later(partial(self._take_desired, payload, at_s))

    def closed(self, connection: MqttConnection, reason: str) -> None:
        """Connect again in the window of the manager; see `ConnectionOwner`."""
        if connection is not self._connection:
            return
        self._ends += 1  # the next broker, as the agent does
        self._connection, self._is_greeted = None, False
        if reason == "lost" or connection.acknowledged < connection.sent:
            self._last = None  # the broker may not have the last report
        if not self._is_off and not self.is_cut:
            self._connect_within(30.0 if self.desired is None else self.desired.reconnect_s)

    def _send(self, kind: Kind, document: object) -> None:
        connection = self._connection
        if connection is None or not self._is_greeted:
            return
        if self._loses():
            connection.abort("lost")
            return
        payload = seal(document, kind, self._key)
        connection.publish(topic(self.name, kind), payload, is_retained=kind in ("hello", "reported"))

    def _loses(self) -> bool:
        return self.behaviour.loss > 0 and self._draw.random() < self.behaviour.loss

    def _next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

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
        self._known_s = max(self._known_s, desired.issued_at)
        self._last = None  # the manager waits for a report that names the version
        self.tick()

    def tick(self) -> None:
        """Decide what to do next, begin it, and report."""
        if self._is_off:
            return
        now_s = time.monotonic()
        self._executions = count_time(self._executions, now_s - self._counted_at)
        self._counted_at = now_s
        views = {name: self._view(name, model) for name, model in self._models.items()}
        plan = reconcile(self.desired, self._executions, views, self._measure())
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
        clock_s = time.time() + self.behaviour.clock_s
        local = time.gmtime(max(0.0, clock_s))
        is_wrong = clock_s < max(LEAST_CLOCK_S, self._known_s - 3600.0)
        return DeviceConditions(
            now_s=None if is_wrong else clock_s,
            minute_of_day=local.tm_hour * 60 + local.tm_min,
            free_bytes=self.behaviour.free_bytes,
            downloaded=frozenset(self._downloaded),
        )

    @staticmethod
    def _view(name: str, model: _SimulatedModel) -> ModelView:
        served = () if model.served_at is None else (model.version,)
        return ModelView(
            model=name,
            version=model.version,
            manifest_sha256=model.manifest_sha256,
            health=model.health,  # type: ignore[arg-type]
            previous=model.previous[0],
            rejected=tuple(model.rejected),
            served=served,
            on_trial=model.on_trial,
            remark=model.remark,
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
        """Break off a step; downloaded bytes stay."""
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
        model, target = self._models.setdefault(step.model, _SimulatedModel()), step.desired_model
        if step.action == "remove":
            self._models.pop(step.model)
        elif step.action == "unload":
            model.served_at = None
        elif target is not None and step.action == "download":
            self._count_bytes(target, target.size_bytes)
            self._downloaded.add(target.sha256)
        elif target is not None and step.action == "install":
            self._install(model, target)
        elif target is not None:
            self._serve(model, target)
        self._later(self.tick)

    def _install(self, model: _SimulatedModel, target: DesiredModel) -> None:
        self._downloaded.discard(target.sha256)
        if self._has(target.version, "install", self._of(target.version).install_failures):
            reason = "the self-test gives other outputs than the package states"
            self._change(
                target.execution, lambda execution: execution.enter("failed", code="self-test", reason=reason)
            )
            return
        if model.version:
            model.previous = (model.version, model.manifest_sha256)
        model.version, model.manifest_sha256, model.health = (
            target.version,
            target.manifest_sha256,
            "unproven",
        )
        model.rejected = [rejection for rejection in model.rejected if rejection[0] != target.manifest_sha256]
        model.served_at, model.on_trial = None, ""
        self._change(target.execution, lambda execution: execution.enter("trying", code="load"))

    def _serve(self, model: _SimulatedModel, target: DesiredModel) -> None:
        model.served_at = time.monotonic()
        is_tried = target.trial != "none" and bool(model.previous[0])
        model.on_trial = target.version if is_tried else ""
        model.remark = f"{target.trial} with {model.previous[0]}" if is_tried else ""
        wait_s = self.behaviour.trial_s if is_tried else self.behaviour.confirm_s
        asyncio.get_running_loop().call_later(wait_s, self._judge, model, target.manifest_sha256)

    def _judge(self, model: _SimulatedModel, manifest_sha256: str) -> None:
        """End a trial as the service does: confirm the version, or return to the old one."""
        if self._is_off or model.manifest_sha256 != manifest_sha256 or model.served_at is None:
            return
        behaviour = self._of(model.version)
        model.on_trial = model.remark = ""
        reason = ""
        if self._has(model.version, "crash", behaviour.crashes):
            reason = "crash loop: 3 restarts within 60 s"
        elif self._has(model.version, "nan", behaviour.not_finite):
            reason = "not finite: outputs hold NaN"
        if reason:
            model.rejected.append((manifest_sha256, reason))
            old = model.previous
            model.version, model.manifest_sha256, model.previous = *old, ("", "")
            model.health = "healthy" if old[0] else "missing"
            model.served_at = time.monotonic() if old[0] else None
        else:
            model.health = "healthy"
        self._later(self.tick)

    def _of(self, version: str) -> VersionBehaviour:
        return self._versions.get(version, _GOOD)

    def _has(self, version: str, fault: str, share: float) -> bool:
        """Return whether this device belongs to the share that has this fault; always the same answer."""
        return random.Random(f"{self.name}/{version}/{fault}").random() < share  # noqa: S311

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
        has_changed = content != self._last
        due_s = self._reported_at + (_REPORT_S if has_changed else self.behaviour.figures_s) - now_s
        if not has_changed and not self._models:
            return
        if due_s > 0:
            self._reporting = loop.call_later(due_s, self._later, self.tick)
            return
        reported = Reported(
            device=self.name,
            sequence=self._next_sequence(),
            desired_version=0 if self.desired is None else self.desired.version,
            status=plan.status,
            because=plan.because,
            models=plan.models,
            executions=(*executions, *plan.superseded),
            figures=self._count_figures(now_s),
            facts={
                "target": self._target,
                "runtime": __version__,
                "free_bytes": str(self.behaviour.free_bytes),
                "clock": f"{time.time() + self.behaviour.clock_s:.0f}",
            },
        )
        self._send("reported", reported)
        self._reported = reported.sequence
        self.counts.reports += 1
        self._last, self._reported_at = content, now_s
        if self._models:
            self._reporting = loop.call_later(self.behaviour.figures_s, self._later, self.tick)

    def _count_figures(self, now_s: float) -> tuple[ModelFigures, ...]:
        figures = []
        for name, model in self._models.items():
            if model.served_at is None or not model.version:
                continue
            behaviour = self._of(model.version)
            requests = int((now_s - model.served_at) * self.behaviour.requests_per_s)
            latency_ms = self.behaviour.latency_ms * behaviour.latency
            agreement = min(1.0, max(0.0, behaviour.agreement + self._draw.uniform(-0.02, 0.02)))
            failed = int(requests * behaviour.errors)
            is_compared = bool(model.previous[0]) and requests > 0
            figures.append(
                ModelFigures(
                    model=name,
                    version=model.version,
                    requests=requests,
                    failed=failed,
                    answer_s=(requests - failed) * latency_ms * 1e-3,
                    p50_ms=latency_ms if requests else None,
                    p99_ms=3 * latency_ms if requests else None,
                    agreement=agreement if is_compared else None,
                    compared=requests if is_compared else 0,
                )
            )
        return tuple(figures)


_GOOD: Final = VersionBehaviour()
