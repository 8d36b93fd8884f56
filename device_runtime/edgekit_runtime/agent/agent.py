"""The agent: a loop that compares desired and actual state, carries out steps, and reports.

The pure function `reconcile` decides what to do next. This module writes each decision into the journal
before the step begins. One thread carries out the steps, so that the loop never waits for a network, a disk
or an engine. Another thread maintains the connection to the broker. Everything else happens on the thread
that calls `run`.

Example: an update of `digits` from 1.0.0 to 2.0.0 begins when a document names 2.0.0. The left column shows
the state of the update:

    waiting, then downloading          step `download`: after a power cut the download resumes
    installing                         step `install`: the package is verified and becomes the active slot
    trying                             no step, because the service tries 2.0.0 and confirms or rejects it
    succeeded                          the slots have confirmed 2.0.0, and the report is `converged`

If the service rejects 2.0.0, the slots switch back to 1.0.0, and the update is `failed` with the reason
from the slots. After a power cut, the agent reads the state from the journal and continues.
"""

import contextlib
import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Final, Literal

from edgekit_runtime import __version__
from edgekit_runtime.agent.conditions import DeviceConditions
from edgekit_runtime.agent.documents import Desired, Event, Execution, Reported
from edgekit_runtime.agent.execution.device_observer import DeviceObserver
from edgekit_runtime.agent.execution.install import Installer
from edgekit_runtime.agent.execution.step_result import StepCarrier, StepOrder, StepResult
from edgekit_runtime.agent.execution.step_runner import StepRunner
from edgekit_runtime.agent.fleet_orders import DeviceLogs, DeviceSettings, Wishes
from edgekit_runtime.agent.journal import Journal, Progress
from edgekit_runtime.agent.link_watch import DocumentLink, LinkWatch, Presence, RefusalPause, Renewer
from edgekit_runtime.agent.membership import Membership
from edgekit_runtime.agent.mqtt_link import LinkMessage, MqttLink
from edgekit_runtime.agent.obeyed_documents import ObeyedDocuments
from edgekit_runtime.agent.reconcile import (
    Action,
    NextSteps,
    Step,
    accept_desired,
    choose_step,
    count_time,
    reconcile,
)
from edgekit_runtime.agent.signing import seal, seal_report
from edgekit_runtime.agent.trusted_time import TrustedTime
from edgekit_runtime.errors import EdgekitError, OutputError, SignatureError
from edgekit_runtime.power.sensors.battery import read_battery
from edgekit_runtime.records import dataclass
from edgekit_runtime.system.engines import list_engines
from edgekit_runtime.system.machine import machine_bytes

_TICK_S: Final = 1.0
_BUSY_TICK_S: Final = 0.25
_SAVE_S: Final = 60.0  # how much of an execution's age a power cut may lose
_REPORT_S: Final = 0.25  # least time between two reports
_DETAIL_S: Final = 5.0  # least time if only amounts have changed
_AGAIN_S: Final = 30.0  # between two attempts to unload or remove a model

_NO_ORDERS: Final = Desired(device="", version=0, issued_at=0.0, expires_at=0.0, epoch=0)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """Options of the agent.

    Attributes:
        fixed: a dict of the settings that the fleet cannot change, see `protocol.device_settings`.
        live_url: URL of the live page of this device, or empty. The console of the fleet links to it.
        shows_logs: whether the fleet may ask for the last lines of the logs.
        takes_settings: whether the fleet may change settings that are not `fixed`.
    """

    fixed: Mapping[str, str] = field(default_factory=dict)
    live_url: str = ""
    shows_logs: bool = True
    takes_settings: bool = True


class Agent:
    def __init__(
        self,
        member: Membership,
        folder: Path,
        installer: Installer,
        options: AgentOptions | None = None,
        *,
        carrier: StepCarrier,
        clock: Callable[[], float] = time.time,
        link: DocumentLink | None = None,
        renew: Renewer | None = None,
        pause: RefusalPause | None = None,
    ) -> None:
        """Read the journal; `run` connects.

        Args:
            member: this device in its fleet.
            folder: folder of the journal, metadata and downloads; it is created.
            installer: the models of the device.
            options: see `AgentOptions`.
            carrier: downloads and installs.
            clock: seconds since 1970.
            link: used in place of a connection to the broker.
            renew: see `Renewer`; None never renews.
            pause: pause that an earlier agent of this process began.
        """
        self._member, self._folder, self._installer = member, folder, installer
        self._device, self._clock = member.enrolment.device, clock
        self._options = options = options or AgentOptions()
        disk, now_s = installer.slots.disk, time.monotonic()
        self._journal = Journal(folder / "journal.json", disk, clock)
        self._documents = ObeyedDocuments(folder, member.enrolment.tuf_root, now_s)
        self._time = TrustedTime(member.enrolment.certificate, folder, clock, time.monotonic)
        self._last_action: Action | None = None
        self._desired = self._read_desired()
        # The last run may have lost this much of their age: else a device that restarts in a loop never
        # times out.
        self._executions = count_time(self._journal.record.executions, _SAVE_S)
        self._steps = StepRunner(folder, installer, carrier)
        self._link: DocumentLink = link or MqttLink(
            self._device, member.enrolment.brokers, member.make_context(self._time)
        )
        if self._desired is not None:  # else a whole site whose power comes back would use a narrow window
            self._link.reconnect_s = self._desired.reconnect_s
        self._observer = DeviceObserver(installer, now_s)
        self._settings = DeviceSettings(folder, disk, options.fixed, is_allowed=options.takes_settings)
        answered = self._journal.record.logs_request
        self._logs = DeviceLogs(self._device, answered, is_allowed=options.shows_logs)
        self._wishes = Wishes(folder, disk)
        self._samples: Mapping[str, Any] = {}  # as the service states them
        self._presence = Presence(member, self._journal, self._link)
        self._watch = LinkWatch(member, folder, self._link, disk, renew=renew, pause=pause, now_s=now_s)
        self._again_s: dict[tuple[Action, str], float] = {}  # (action, model) -> time of the next try
        self._last: tuple[Any, Any] = (None, None)  # content of the last report
        self._reported_s = 0.0
        self._boot = _read_boot()

    def run(self, stop: threading.Event) -> Literal["stopped", "renewed"]:
        """Work until `stop` is set, or until a new certificate or a new fleet requires a new connection.

        At the end, the agent publishes its last will, which the broker would publish only after a lost
        connection.

        Returns:
            `renewed` if there is a new certificate or fleet, otherwise `stopped`.
        """
        self.connect()
        last_s = time.monotonic()
        try:
            while not stop.is_set():
                is_busy = self._steps.is_busy or _is_under_way(self._executions)
                self._receive(_BUSY_TICK_S if is_busy else _TICK_S)
                now_s = time.monotonic()
                if not self.turn(now_s - last_s):
                    stop.wait(_TICK_S)
                last_s = now_s
                self._watch.note_link(self._time.now_s)
                if self._watch.has_renewed(now_s, self._time.stated_s):
                    return "renewed"
        finally:
            self._steps.close()
            self._presence.publish_will()
            self._link.stop()
            self._watch.note_end(self._time.now_s)
        return "stopped"

    def connect(self) -> None:
        """Set the last will and begin to connect. `run` calls this first."""
        self._presence.prepare()
        self._link.start()

    def turn(self, elapsed_s: float) -> bool:
        """Process received messages, decide, begin a step, and report. `run` calls this repeatedly.

        `elapsed_s` is the time since the last call.

        Returns:
            False after a failure, for example because the disk is full. The next call tries again.
        """
        self._receive(0.0)
        try:
            self._tick(elapsed_s)
        except (EdgekitError, OSError) as error:
            _logger.warning("%s", error)
            return False
        return True

    @property
    def _orders(self) -> Desired:
        return self._desired or _NO_ORDERS

    # Receiving

    def _receive(self, timeout_s: float) -> None:
        with contextlib.suppress(queue.Empty):
            message = self._link.received.get(timeout=timeout_s)
            while True:
                try:
                    self._take(message)
                except (EdgekitError, OSError) as error:
                    _logger.warning("%s", error)
                message = self._link.received.get_nowait()

    def _take(self, message: LinkMessage) -> None:
        if message.kind == "hello":
            self._presence.own_address = message.payload.decode()
            self._send_hello(is_new_connection=True)
        elif message.kind == "event":
            self._emit("attack", message.payload.decode())
        else:
            try:
                self._take_desired(message.payload)
            except SignatureError as error:
                self._emit("attack", f"{message.kind}: {error}")

    def _take_desired(self, payload: bytes) -> None:
        desired = self._documents.unseal(payload, time.monotonic(), self._link.reconnect_s)
        if desired is None or not accept_desired(desired, self._desired, self._device):
            return
        # Also if that is earlier than the last one: the manager's clock was wrong, its newest word counts.
        known_s = desired.issued_at
        record = replace(self._journal.record, desired=payload.decode(), known_time_s=known_s)
        self._journal.write(record)
        self._time.note(known_s)
        self._desired, self._link.reconnect_s = desired, desired.reconnect_s
        if desired.notice:
            _logger.warning("the fleet says: %s", desired.notice)
        self._last = (None, None)  # the manager waits for a report that names the version
        if self._journal.raise_sequence(desired.sequence):  # the manager took this hello for late
            self._presence.renew_number()
            self._send_hello()

    def _read_desired(self) -> Desired | None:
        record = self._journal.record
        desired = self._documents.read_held(record.desired)
        if desired is None and record.desired:  # the manager's key has changed
            with contextlib.suppress(OutputError):  # on a full disk: it counts no more all the same
                # A thief of the old key may have stated a time far ahead.
                self._journal.write(replace(record, desired="", known_time_s=0.0))
        self._time.note(0.0 if desired is None else record.known_time_s)
        return desired

    def _follow_keys(self, result: StepResult | None) -> None:
        """Obey the keys of a newly followed root, and take the document that waited for these keys.

        Args:
            result: result of a refresh; None after another step.
        """
        has_new_keys = self._documents.follow()
        if has_new_keys:
            self._desired = self._read_desired()
        if result is None and not has_new_keys:
            return
        was_answered = result is not None and result.outcome != "retry"
        waiting = self._documents.end_refresh(
            time.monotonic(),
            was_answered=was_answered,
            has_cost=was_answered or (result is not None and result.code == "cut-off"),
            has_new_keys=has_new_keys,
        )
        if waiting is not None:
            self._take(LinkMessage("desired", waiting))
        if has_new_keys and self._desired is None and self._link.is_connected:
            self._send_hello()  # the manager answers with its document

    # Sending

    def _send_hello(self, *, is_new_connection: bool = False) -> None:
        self._presence.publish_hello(self._orders.version, is_new_connection=is_new_connection)

    def _emit(self, kind: str, text: str) -> None:
        _logger.warning("%s: %s", kind, text)
        at = max(0.0, self._clock())
        sequence = self._journal.next_sequence()
        event = Event(device=self._device, sequence=sequence, kind=kind, text=text[:1000], at=at)
        self._link.put("event", seal(event, "event", self._member.key), key=kind)

    # Steps

    def _tick(self, elapsed_s: float) -> None:
        self._executions = count_time(self._executions, elapsed_s)
        for name, result in self._steps.collect():
            self._executions = tuple(
                result.apply(execution) if execution.report.execution == name else execution
                for execution in self._executions
            )
            self._observer.forget()
            was_refresh, was_upload = self._last_action == "refresh", self._last_action == "upload"
            self._follow_keys(result if was_refresh else None)
            if was_upload:
                self._wishes.uploads.note_end(result, time.monotonic())
        for kind, text in self._steps.take_events():
            self._emit(kind, text)
        self._count_bytes()
        self._save_time()
        if self._desired is not None:
            self._wishes.write(self._desired)
            self._settings.follow(self._desired.settings)
            self._answer_logs(self._desired)
        self._observer.look(
            time.monotonic(),
            is_step_running=self._steps.is_busy,
            is_under_way=_is_under_way(self._executions),
        )
        conditions = self._measure()
        plan = reconcile(self._add_window(self._desired), self._executions, self._observer.views, conditions)
        self._save(plan.executions)
        self._executions = plan.executions
        is_due = self._documents.is_refresh_due(time.monotonic())
        held_orders = self._wishes.uploads.list_held(self._orders.samples, conditions)
        may_upload = self._may_upload(held_orders, conditions)
        self._stop_needless(plan, is_urgent=is_due, may_upload=may_upload)
        step = None
        if not self._steps.is_busy:
            step = Step("refresh", "") if is_due else self._choose_step(plan)
            step = step or (Step("upload", "") if may_upload else None)
        if step is not None:
            # It counts in the month's budget, and an empty one does not stop it: a thief of the manager's key
            # could use the budget up, and would be obeyed until the next month.
            self._last_action = step.action
            order = StepOrder(
                step=step,
                most_bytes=conditions.budget_left_bytes,
                known_time_s=self._time.least_s,
                bytes_per_s=None if (cap := self._settings.find_number("cap-kbit-s")) is None else cap * 125,
                held_orders=held_orders,
            )
            self._steps.begin(order)
        self._report(plan)

    def _add_window(self, desired: Desired | None) -> Desired | None:
        """Return the document with the device's own window where a rollout names none."""
        window = self._settings.find("window")
        if desired is None or not window:
            return desired
        models = tuple(replace(model, window=model.window or window) for model in desired.models)
        return replace(desired, models=models)

    def _answer_logs(self, desired: Desired) -> None:
        logs = self._logs.take(desired.logs, self._installer.find_service())
        if logs is not None:
            logs = replace(logs, sequence=self._journal.next_sequence())
            self._link.put("logs", seal(logs, "logs", self._member.key))
            self._journal.write(replace(self._journal.record, logs_request=logs.request))

    def _choose_step(self, plan: NextSteps) -> Step | None:
        """Return the step to do now; an `unload` or `remove` without effect comes again later."""
        now_s = time.monotonic()
        self._again_s = {key: at for key, at in self._again_s.items() if now_s < at}
        step = choose_step(plan.steps, self._again_s)
        if step is not None and step.action in ("unload", "remove"):
            self._again_s[step.action, step.model] = now_s + _AGAIN_S
        return step

    def _may_upload(self, held_orders: tuple[str, ...], conditions: DeviceConditions) -> bool:
        """Return whether samples may be sent now; the service says whether the device's owner allows it."""
        now_s = time.monotonic()
        is_needed = bool(self._orders.samples) or self._wishes.uploads.look(now_s)
        self._samples = self._observer.read_samples(now_s, is_needed=is_needed)
        return self._link.is_connected and self._wishes.uploads.may_send(
            now_s, held_orders, conditions, self._samples
        )

    def _stop_needless(self, plan: NextSteps, *, is_urgent: bool, may_upload: bool) -> None:
        """Stop a step that is no longer wanted, or that goes on after a more urgent one.

        A download waits for a refresh, an upload for all else.
        """
        if self._steps.action == "upload" and (is_urgent or plan.steps or not may_upload):
            self._steps.stop()
        under_way = {execution.report.execution for execution in plan.executions if not execution.has_ended}
        self._steps.retain(
            set()
            if is_urgent
            else {step.desired_model.execution for step in plan.steps if step.desired_model is not None},
            under_way & {model.execution for model in self._orders.models},
        )

    def _count_bytes(self) -> None:
        """Add the bytes that a download received to its execution, and to the month's budget."""
        execution, came_bytes, done_bytes = self._steps.take_counts()
        if not came_bytes:
            return
        self._executions = tuple(
            _add_bytes(progress, came_bytes, done_bytes)
            if progress.report.execution == execution
            else progress
            for progress in self._executions
        )
        month = self._read_month()
        metered_bytes = self._journal.count_metered(month) + came_bytes
        self._journal.write(replace(self._journal.record, month=month, metered_bytes=metered_bytes))

    def _save(self, executions: tuple[Progress, ...]) -> None:
        """Write the executions to the journal if a state has changed, or an age has grown much."""
        written = self._journal.record.executions
        is_same = list(map(_outline, executions)) == list(map(_outline, written))
        is_old = any(
            execution.age_s - other.age_s > _SAVE_S
            for execution, other in zip(executions, written, strict=False)
        )
        if not is_same or is_old:
            self._journal.write(replace(self._journal.record, executions=executions))

    def _save_time(self) -> None:
        """Write the bound to the journal, once an hour, where the clock cannot tell it after a restart."""
        record = self._journal.record
        if record.desired and self._time.outgrows(record.known_time_s):
            self._journal.write(replace(record, known_time_s=self._time.stated_s))

    def _measure(self) -> DeviceConditions:
        local = time.localtime(max(0.0, self._clock()))
        month_mb = self._settings.find_number("month-mb")
        budget = None if month_mb is None else int(month_mb * 1e6)
        used = self._journal.count_metered(self._read_month())
        battery, is_charging = read_battery()
        return DeviceConditions(
            now_s=self._time.now_s,
            minute_of_day=None if self._time.is_clock_behind else local.tm_hour * 60 + local.tm_min,
            free_bytes=self._read_free_bytes(),
            budget_left_bytes=None if budget is None else max(0, budget - used),
            battery=battery,
            is_charging=is_charging,
            downloaded=self._steps.list_downloaded(),
        )

    def _read_month(self) -> str:
        return time.strftime("%Y-%m", time.gmtime(self._time.now_s))

    def _read_free_bytes(self) -> int:
        try:
            return shutil.disk_usage(self._folder).free
        except OSError:
            return 0

    # Reports

    def _report(self, plan: NextSteps) -> None:
        if not self._link.is_connected:
            return
        now_s = time.monotonic()
        streams = self._observer.read_streams(now_s, self._orders.streams)
        settings = self._settings.list_states(self._installer.find_service(), now_s)
        samples = self._wishes.uploads.report(self._orders.samples, self._samples, self._clock())
        main = (
            plan.status,
            plan.because,
            plan.models,
            {name: replace(stream, fps=0.0) for name, stream in streams.items()},
            settings,
            list(map(_outline, plan.executions)),
        )
        figures = self._observer.read_figures(now_s, is_under_way=_is_under_way(plan.executions))
        # The charge of a battery alone is no news: it changes all the time.
        detail = (
            [execution.report for execution in plan.executions],
            [replace(entry, gauges={}) for entry in figures],
            samples,
        )
        wait_s = _REPORT_S if main != self._last[0] else _DETAIL_S
        if (main, detail) == self._last or now_s - self._reported_s < wait_s:
            return
        executions = (*(execution.report for execution in plan.executions), *plan.superseded)
        reported = Reported(
            device=self._device,
            sequence=self._journal.next_sequence(),
            desired_version=self._orders.version,
            status=plan.status,
            because=_shorten(plan.because),
            models=tuple(replace(model, because=_shorten(model.because)) for model in plan.models),
            executions=tuple(_shorten_reason(execution) for execution in executions),
            figures=figures,
            facts=self._list_facts(),
            streams=streams,
            settings=settings,
            samples=samples,
        )
        self._link.put("reported", seal_report(reported, self._member.key), is_retained=True)
        self._presence.last_report = reported.sequence
        self._last, self._reported_s = (main, detail), now_s

    def _list_facts(self) -> dict[str, str]:
        enrolment = self._member.enrolment
        battery, is_charging = read_battery()
        facts = {
            "target": enrolment.target,
            "runtime": __version__,
            "free_bytes": str(self._read_free_bytes()),
            "memory_bytes": str(machine_bytes()),
            "engines": ",".join(list_engines()),
            "boot": self._boot,
            "clock": f"{self._clock():.0f}",
        }
        if self._time.is_clock_behind:
            facts["clock_fault"] = "behind"
        if self._options.live_url:
            facts["live"] = self._options.live_url
        if battery is not None:
            facts["battery"] = f"{battery:.2f}{', charging' if is_charging else ''}"
        return facts


def _is_under_way(executions: tuple[Progress, ...]) -> bool:
    return any(not execution.has_ended for execution in executions)


def _outline(progress: Progress) -> tuple[Any, ...]:
    """Return the part that must be on the disk before a step; amounts and ages on the disk may be older."""
    report = progress.report
    return report.execution, report.state, report.code, report.reason, progress.failures


def _add_bytes(progress: Progress, came_bytes: int, done_bytes: int) -> Progress:
    report = progress.report
    sent_bytes = report.sent_bytes + came_bytes
    return replace(progress, report=replace(report, sent_bytes=sent_bytes, done_bytes=done_bytes))


def _shorten(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}..."


def _shorten_reason(execution: Execution) -> Execution:
    return replace(execution, reason=_shorten(execution.reason))


def _read_boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()[:8]
    except OSError:
        return ""
