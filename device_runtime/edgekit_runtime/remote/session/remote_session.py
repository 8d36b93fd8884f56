"""A session that runs each request where it is answered soonest: here, on a server, or split between both.

The caller gets right answers only. A reply that is late, wrong or missing is replaced by a local run, which
begins when the reply is later than predicted; the first answer wins and the other is cancelled. Probes run
on a thread of their own: no request waits for a server that has not proved itself on golden inputs.

The choice is `choose`, the link `link_estimate`, the wire `offload_server`.
"""

import dataclasses
import math
import os
import random
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from edgekit_runtime.codecs.compression import IDENTITY, has_zstd
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.errors import (
    BackendError,
    CutError,
    DataError,
    EdgekitError,
    RefusedInputError,
    RequestError,
    TransportError,
)
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.remote.choose import HYSTERESIS, PlanChoice, Preference, choose
from edgekit_runtime.remote.cut_table import Compression, CutTable, Escalation, OffloadPlan
from edgekit_runtime.remote.latency_model import Conditions, LinkState, as_sent, predict_s, send_plain
from edgekit_runtime.remote.link_estimate import LinkEstimate
from edgekit_runtime.remote.offload_options import OffloadOptions
from edgekit_runtime.remote.offload_server import (
    OffloadServer,
    Pending,
    Reply,
    ReplyError,
    ServerTimes,
    TailRequest,
    is_overload,
    make_tail_request,
    make_upload_probe,
)
from edgekit_runtime.remote.offload_status import Counts, OffloadStatus, StatusFile
from edgekit_runtime.remote.probe_schedule import CircuitBreaker, HedgePolicy, ProbeSchedule, ReplyWait
from edgekit_runtime.sessions.row_independence import has_free_rows
from edgekit_runtime.sessions.selftest import GoldenCase, read_golden
from edgekit_runtime.sessions.session import Session, open_choice
from edgekit_runtime.tensors import Array, TensorSpec

_RECENT: Final = 8  # runs of this device that its load is taken from
_RECONSIDER: Final = 16  # local runs between two choices while nothing else changed
_LEAST_HEAD_S: Final = 5e-4  # a shorter run says little about the device
_LEAST_BYTES: Final = 1500  # acknowledged: less is a link that carries nothing
_PROBE_TIMEOUT_S: Final = 2.0
_PROBE_SEND_S: Final = 0.04  # on the link as it seems to be
_LEAST_UPLOAD: Final = 12 << 10  # bytes of a probe: what TCP sends at once
_MOST_UPLOAD: Final = 64 << 10
_BITS: Final = 8
_ROUND_TRIP_AGE_S: Final = 10.0
_CLOSE_S: Final = 0.2  # for a probe to end
_TICK_S: Final = 0.25
_BUSY_TICK_S: Final = 0.1
_REFUSED_S: Final = 30.0  # until a server without a tail is asked for it again
_MANY_BITS_PER_S: Final = 1e10
_MOST_TABLES: Final = 16
_IN_DEBT: Final = "local runs beside late replies have used up their share of this device"
_MOST_CAUSE: Final = 300  # characters of what a server says
_SWITCHES: Final = 8


class _Way:
    """A plan that needs the server, ready to run.

    Attributes:
        plan: the plan, without compression where this device or the server cannot do it.
        is_proved: whether the server has answered its golden inputs rightly.
        retry_s: when to ask a server again that does not have the tail.

    Raises:
        CutError: head and tail do not give all outputs of the model.
    """

    def __init__(self, plan: OffloadPlan, package: OpenedPackage, threads: int | None) -> None:
        self.plan, self._package, self._threads = plan, package, threads
        self.is_proved, self.retry_s = False, -math.inf
        self._head: Session | None = None
        self._is_open = True
        self._lock = threading.Lock()
        shown = package
        for submodel in package.manifest.submodels:
            view = package.select_submodel(submodel.name)
            if view.manifest.name == plan.tail:
                shown = view
        self.inputs = shown.manifest.inputs
        self.outputs = shown.manifest.outputs
        self._shown = shown
        self._codecs = {name: MediaCodec.parse(codec) for name, codec in plan.media.items()}
        self._check_outputs()

    def open_head(self) -> Session | None:
        """Return the head, loaded; None where the inputs are sent as they are."""
        with self._lock:
            if not self._is_open:
                raise BackendError("backend 'offload': the session is closed")
            if self._head is None and self.plan.head is not None:
                view = self._package.select_submodel(self.plan.head)
                self._head = open_choice(view, view.manifest.backend, self._threads)
            return self._head

    def run_head(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs of the head; none where the inputs are sent as they are."""
        head = self._head or self.open_head()
        return {} if head is None else head.run({spec.name: inputs[spec.name] for spec in head.inputs})

    def prepare(
        self,
        inputs: Mapping[str, Array],
        made: Mapping[str, Array],
        outputs: tuple[TensorSpec, ...],
        *,
        compression: Compression,
        fields: str,
    ) -> TailRequest:
        """Return the request of the tail.

        Args:
            inputs: of the model.
            made: outputs of the head.
            outputs: the outputs of the model.
            compression: of the body.
            fields: header lines of the server.

        Raises:
            DataError: there is nothing for one of its inputs, or media of several rows.
        """
        sent = {}
        for spec in self.inputs:
            array = made[spec.name] if spec.name in made else inputs.get(spec.name)
            if array is None:
                raise DataError(f"plan '{self.plan.name}': nothing makes '{spec.name}', which its tail takes")
            codec = self._codecs.get(spec.name)
            sent[spec.name] = array if codec is None else _encode(codec, array)
            spec.check(sent[spec.name])
        expected = _bind(outputs if self._shown is self._package else self.outputs, self.inputs, sent)
        return make_tail_request(self.plan.tail or "", sent, expected, compression, fields)

    def read_golden(self) -> GoldenCase:
        """Return what the tail must compute."""
        return read_golden(self._shown)

    def prepare_golden(self, golden: GoldenCase, fields: str) -> TailRequest:
        """Return the request that proves the server."""
        expected = _bind(self.outputs, self.inputs, golden.inputs)
        return make_tail_request(self.plan.tail or "", golden.inputs, expected, self.plan.compression, fields)

    def interrupt(self) -> None:
        """End the runs of the head."""
        if (interrupt := getattr(self._head, "interrupt", None)) is not None:
            interrupt()

    def close(self) -> None:
        """Close the head; it is not opened again."""
        with self._lock:
            self._is_open = False
            if self._head is not None:
                self._head.close()

    def _check_outputs(self) -> None:
        manifest, plan = self._package.manifest, self.plan
        parts = {one.name: {spec.name for spec in one.outputs} for one in manifest.submodels}
        made = parts.get(plan.head or "", set())
        if plan.escalation is None:
            made = made | {spec.name for spec in self.outputs}
        needed = {spec.name for spec in manifest.outputs}
        if plan.escalation is not None:
            needed.add(plan.escalation.output)
        if missing := sorted(needed - made):
            raise CutError(f"plan '{plan.name}' does not give {', '.join(missing)}; plan the model again")


class _Replied:
    """The outputs of a reply, as a session that golden outputs are compared with."""

    def __init__(self, outputs: dict[str, Array]) -> None:
        self.inputs: tuple[TensorSpec, ...] = ()
        self.outputs: tuple[TensorSpec, ...] = ()
        self._outputs = outputs

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return them."""
        del inputs
        return self._outputs

    def close(self) -> None:
        """Do nothing."""


class _Hedge:
    """A local run beside a late request.

    Attributes:
        session: runs it where a reply can end it; None elsewhere, and until it begins.
        is_ended: whether a reply has ended it.
        took_s: how long it took; None until it is over.
        is_waste: whether the server answers too, or would have; None until that is known.
    """

    __slots__ = ("is_ended", "is_waste", "session", "took_s")

    def __init__(self) -> None:
        self.session: Any = None
        self.is_ended = False
        self.took_s: float | None = None
        self.is_waste: bool | None = None


class RemoteSession:
    """A model of a package with a cut table, with a server.

    Attributes:
        inputs, outputs: of the model.
        local: the session that runs all of it here, or None where the device cannot; a self-test runs there.
        counts: how requests were answered.
        is_concurrent: `run` may be called from several threads; so it is where the local engine can that.
        may_wait: `run` may wait for a server, so it has no place on an event loop.
    """

    may_wait: ClassVar[bool] = True

    def __init__(
        self,
        package: OpenedPackage,
        table: CutTable,
        options: OffloadOptions,
        local: Session | None,
        threads: int | None,
    ) -> None:
        """Begin locally, and prove the server in the background.

        Args:
            package: stays open until `close`, which closes it.
            table: its cut table.
            options: which server, and what to choose for.
            local: session of the whole model, owned from now on; None where no plan runs it here.
            threads: threads of a head, or None.

        Raises:
            ConfigError: the token cannot be read.
        """
        if not has_zstd():
            table = dataclasses.replace(table, plans=tuple(map(send_plain, table.plans)))
        source = package.manifest if local is None else local
        self.inputs, self.outputs = source.inputs, source.outputs
        self.local, self.counts = local, Counts()
        self.is_concurrent: bool = local is None or getattr(local, "is_concurrent", False)
        self._package, self._options = package, options
        self._ways = {plan.name: _Way(plan, package, threads) for plan in table.plans if plan.tail}
        self._tables = {1: table}
        self._has_rows = local is not None and has_free_rows(local)
        self._preference = Preference(
            options.prefer or table.objective, options.deadline_s, plan=options.plan
        )
        self._server = OffloadServer(options.address, options.read_token())
        self._estimate, self._breaker = LinkEstimate(), CircuitBreaker()
        self._device: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._compute: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._wait_s = self._load = 0.0
        self._hedges = HedgePolicy(options.hedge_share, table.local.costs.device_s if table.local else 0.0)
        self._has_local_failed = False  # the last run of it
        self._decisions: dict[int, tuple[int, PlanChoice]] = {}
        self._epoch = self._since = self._running = 0
        self._late: Pending | None = None  # the last request that was late
        self._switches: deque[str] = deque(maxlen=_SWITCHES)
        self._lock = threading.Lock()
        self._is_open, self._wake = True, threading.Event()
        self._probed = threading.Event()
        self._schedule = ProbeSchedule(time.monotonic(), options.probe_bytes_per_hour)
        self._round_trip_s = -math.inf  # when it was last measured
        self._asked = -1  # requests before the last probe
        self._answered = ""  # the plan with which the server last answered
        self._chance = random.Random()  # noqa: S311  # spreads devices over time; guards nothing
        self._status = StatusFile(id(self))
        self._prober = threading.Thread(target=self._probe_loop, name="edgekit-prober", daemon=True)
        self._prober.start()

    # Requests

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return all outputs for one set of inputs, see `Session.run`.

        Raises:
            DataError: an array does not fit its spec.
            RefusedInputError: the engine refused these inputs.
            BackendError: the engine failed, or the server where the model cannot run here.
        """
        if not self._is_open:
            raise BackendError("backend 'offload': the session is closed")
        rows = self._count_rows(inputs)
        known = self._decisions.get(rows)
        decision = known[1] if known is not None and known[0] == self._epoch else self._decide(rows)
        self._running += 1
        try:
            if decision.plan.tail is None:
                self.counts.local += 1
                with self._lock:
                    self._hedges.earn(decision.predicted_s, decision.predicted_s)
                return self._run_local(inputs, rows)
            return self._run_split(decision, inputs, rows)
        finally:
            self._running -= 1
            if time.monotonic() >= self._schedule.due_s:
                self._wake.set()  # for a probe between two requests

    def decision(self, rows: int = 1) -> PlanChoice:
        """Return what the next request of so many rows runs, and why."""
        known = self._decisions.get(rows)
        return known[1] if known is not None and known[0] == self._epoch else self._decide(rows)

    def wait_for_probe(self, timeout_s: float) -> bool:
        """Wait until the server has been probed for the first time; return whether it was."""
        return self._probed.wait(timeout_s)

    def interrupt(self) -> None:
        """End all runs with an error, from any thread."""
        self._server.interrupt()
        for part in (self.local, *self._ways.values()):
            if (interrupt := getattr(part, "interrupt", None)) is not None:
                interrupt()

    def close(self) -> None:
        """Free the model and the connections; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        self._wake.set()
        self._server.close()
        self._prober.join(_CLOSE_S)  # it may connect to nobody, and ends by itself when that fails
        for way in self._ways.values():
            way.close()
        if self.local is not None:
            self.local.close()
        self._status.close()
        self._package.close()

    def _count_rows(self, inputs: Mapping[str, Array]) -> int:
        """Return how many rows a request has; 1 where that is no matter, or the inputs are wrong."""
        first = next(iter(inputs.values()), None) if self._has_rows else None
        shape = getattr(first, "shape", ())
        return max(1, shape[0]) if shape else 1

    def _run_local(
        self, inputs: Mapping[str, Array], rows: int, hedge: _Hedge | None = None
    ) -> dict[str, Array]:
        local: Session | None = self.local if hedge is None else hedge.session or self.local
        if local is None:
            raise BackendError("backend 'offload': this package has no plan that runs on this device alone")
        began_s = time.monotonic()
        try:
            outputs = local.run(inputs)
        except BackendError as cause:
            if not isinstance(cause, RefusedInputError) and (hedge is None or not hedge.is_ended):
                self._has_local_failed = True
                self._epoch += 1
            raise
        self._has_local_failed = False
        plan = self._tables[1].local
        if plan is not None:
            planned_s = plan.costs.device_s - plan.costs.request_s
            self._device.append((time.monotonic() - began_s, planned_s * rows))
        self._since += 1
        if self._since >= _RECONSIDER:
            self._since = 0
            self._epoch += 1
        return outputs

    def _run_split(self, decision: PlanChoice, inputs: Mapping[str, Array], rows: int) -> dict[str, Array]:
        way = self._ways[decision.plan.name]
        if inputs.keys() != {spec.name for spec in self.inputs}:
            names = [spec.name for spec in self.inputs]
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(names)}")
        for spec in self.inputs:
            spec.check(inputs[spec.name])
        began_s = time.monotonic()
        try:
            made = way.run_head(inputs)
            if decision.plan.escalation is not None and _is_sure(made, decision.plan.escalation):
                self.counts.local += 1
                return {spec.name: made[spec.name] for spec in self.outputs}
            compression = decision.plan.compression
            request = way.prepare(
                inputs, made, self.outputs, compression=compression, fields=self._server.fields
            )
        except EdgekitError:
            if self.local is None:
                raise
            outputs = self._run_local(inputs, rows)  # which fails too if the inputs are to blame
            self._disprove(way)
            return outputs
        head_s, costs = time.monotonic() - began_s, decision.plan.costs
        if decision.plan.head is not None and costs.device_s - costs.request_s > _LEAST_HEAD_S:
            self._device.append((head_s, (costs.device_s - costs.request_s) * rows))
        outputs = self._fetch(decision, request, inputs, rows, began_s=began_s)
        return {
            spec.name: outputs[spec.name] if spec.name in outputs else made[spec.name]
            for spec in self.outputs
        }

    def _fetch(
        self,
        decision: PlanChoice,
        request: TailRequest,
        inputs: Mapping[str, Array],
        rows: int,
        *,
        began_s: float,
    ) -> dict[str, Array]:
        """Return the outputs of the tail, or those of the whole model from a local run."""
        way, hedge = self._ways[decision.plan.name], _Hedge()
        local_s, expected_s = self._local_s(rows), self._reply_s(decision)
        sent_s = time.monotonic()

        def finish(_: Pending, reply: Reply) -> None:
            if reply.outputs is not None:
                with self._lock:
                    self._hedges.note_reply(time.monotonic() - sent_s, expected_s)
            self._settle(hedge, is_waste=reply.outputs is not None or _is_moving(reply))
            self._note(decision.plan, rows, reply, is_late=hedge.session is not None)
            if reply.outputs is not None and hedge.session is not None:
                hedge.is_ended = True
                hedge.session.interrupt()

        if self.local is None:
            pending = self._server.send(request, self._options.timeout_s, finish)
            pending.done.wait()
            return self._take(pending)
        patience_s = max(1.0, 4 * (expected_s + local_s))  # only a hedge ends it sooner
        timeout_s = self._options.timeout_s if decision.is_forced else patience_s
        pending = self._server.send(request, timeout_s, finish)
        if decision.is_forced:
            is_there = pending.done.wait(timeout_s)
        else:
            conditions = decision.conditions
            with self._lock:
                self._hedges.earn(decision.plan.costs.device_s * conditions.device_slowdown, local_s)
            allowed_s = self._allow_s(expected_s, local_s, sent_s - began_s)
            after_s, size_bytes = self._after_upload_s(decision), request.size_bytes
            wait = ReplyWait(allowed_s, local_s, after_s, size_bytes, link=conditions.link)
            is_there = self._await_reply(pending, wait)
        if not is_there:
            return self._hedge(pending, way, inputs, rows, hedge)
        reply = pending.reply
        if reply is not None and reply.outputs is not None:
            self.counts.remote += 1
            self._answered = way.plan.name
            return reply.outputs
        self.counts.failed += 1
        return self._run_local(inputs, rows)

    def _await_reply(self, pending: Pending, wait: ReplyWait) -> bool:
        """Return whether the reply comes before it is time for a local run."""
        began_s, more_s = time.monotonic(), wait.look_s
        while not pending.done.wait(more_s):
            found_s = wait.more_s(time.monotonic() - began_s, pending.sent_bytes)
            if found_s is None:
                return False
            more_s = found_s
        return True

    def _hedge(
        self, pending: Pending, way: _Way, inputs: Mapping[str, Array], rows: int, hedge: _Hedge
    ) -> dict[str, Array]:
        """Run locally beside a late request, and return whichever answers first."""
        self.counts.hedged += 1
        share = getattr(self.local, "share", None)
        hedge.session = None if share is None else share()
        self._late = pending
        try:
            if not (
                pending.done.is_set() and pending.reply is not None and pending.reply.outputs is not None
            ):
                began_s = time.monotonic()
                try:
                    outputs = self._run_local(inputs, rows, hedge)
                finally:
                    self._settle(hedge, took_s=time.monotonic() - began_s)
                if not pending.done.is_set():
                    if not self._estimate.is_claimed:
                        self._fail("the reply was late", way)
                    if not pending.is_sent:
                        pending.abort()  # the rest would only be in the way of the next request
                return outputs
        except BackendError:
            pending.done.wait()
            if pending.reply is None or pending.reply.outputs is None:
                raise
        self.counts.remote += 1
        self._answered = way.plan.name
        return self._take(pending)

    def _settle(self, hedge: _Hedge, *, took_s: float | None = None, is_waste: bool | None = None) -> None:
        """Charge a local run once its time and the fate of the request are known, in either order.

        A local run that takes the place of a server that is silent or fails is no waste, and costs nothing:
        the breaker opens, so there are few.
        """
        with self._lock:
            hedge.took_s = took_s if hedge.took_s is None else hedge.took_s
            hedge.is_waste = is_waste if hedge.is_waste is None else hedge.is_waste
            if hedge.is_waste and hedge.took_s is not None:
                self._hedges.spend(hedge.took_s)
                self._epoch += 1

    def _take(self, pending: Pending) -> dict[str, Array]:
        reply = pending.reply
        if reply is not None and reply.outputs is not None:
            return reply.outputs
        error = None if reply is None else reply.error
        raise BackendError(
            f"backend 'offload': the server {self._server} failed: {_show(str(error))}"
        ) from error

    # What is known

    def _decide(self, rows: int) -> PlanChoice:
        with self._lock:
            epoch, now_s = self._epoch, time.monotonic()
            known = self._decisions.get(rows)
            usable = {
                name
                for name, way in self._ways.items()
                if way.is_proved and (rows == 1 or not way.plan.media)  # a file holds one row
            }
            is_in_debt = self._hedges.is_in_debt and not self._has_local_failed
            decision = choose(
                self._table(rows),
                self._conditions(now_s),
                None if known is None else known[1],
                self._preference,
                usable=usable,
                server_load=self._load,
                cause=self._breaker.cause or (_IN_DEBT if is_in_debt else ""),
            )
            decision = dataclasses.replace(decision, plan=as_sent(decision.plan, decision.conditions))
            if len(self._decisions) > _MOST_TABLES:
                self._decisions.clear()
            self._decisions[rows] = (epoch, decision)
            if known is None or known[1].plan.name != decision.plan.name:
                if known is not None and known[1].plan.name == self._answered:
                    self._schedule.restart(now_s)
                    self._answered = ""
                self._switches.append(f"{decision.plan.name}: {decision.reason}")
                self._wake.set()
            return decision

    def _table(self, rows: int) -> CutTable:
        if rows not in self._tables:
            if len(self._tables) > _MOST_TABLES:
                self._tables = {1: self._tables[1]}
            self._tables[rows] = _scale(self._tables[1], rows)
        return self._tables[rows]

    def _conditions(self, now_s: float) -> Conditions:
        link = self._estimate.state(now_s) if self._breaker.is_closed else None
        return Conditions(link, _ratio(self._device), _ratio(self._compute), self._wait_s)

    def _local_s(self, rows: int) -> float:
        plan = self._tables[1].local
        return 0.0 if plan is None else plan.costs.device_s * rows * _ratio(self._device)

    def _reply_s(self, decision: PlanChoice) -> float:
        """Return how long the server's part is expected to take, once the request is ready."""
        plan = decision.plan
        whole = dataclasses.replace(plan, escalation=None) if plan.escalation is not None else plan
        slowdown = decision.conditions.device_slowdown
        remote_s = max(0.0, predict_s(whole, decision.conditions) - plan.costs.device_s * slowdown)
        return remote_s + max(plan.costs.request_s * slowdown, self._estimate.overhead_s)

    def _after_upload_s(self, decision: PlanChoice) -> float:
        """Return how long a reply takes at most after the last byte of its request arrived."""
        costs, conditions = decision.plan.costs, decision.conditions
        server_s = costs.server_s * conditions.server_slowdown + conditions.server_wait_s
        return server_s + 2 * (self._estimate.rtt_s or 0.0)

    def _allow_s(self, expected_s: float, local_s: float, spent_s: float) -> float:
        """Return how long to wait for a reply before the local run begins."""
        if self._estimate.is_claimed and self._hedges.may_hedge(local_s):
            return 0.0  # this request is the test of what a probe claims: both ways at once
        return self._hedges.allow_s(expected_s, local_s, spent_s)

    def _fail(self, cause: str, way: _Way | None = None, at_least_s: float = 0.0) -> None:
        """Leave the server until it has answered golden inputs: those of `way`, where it is to blame."""
        with self._lock:
            if way is not None:
                way.is_proved = False
            self._breaker.fail(time.monotonic(), _show(cause), self._chance.random(), at_least_s)
            self._epoch += 1

    def _disprove(self, way: _Way) -> None:
        with self._lock:
            way.is_proved, way.retry_s = False, time.monotonic() + _REFUSED_S
            self._epoch += 1

    def _note(self, plan: OffloadPlan, rows: int, reply: Reply, *, is_late: bool) -> None:
        """Learn from a reply; on the thread of its connection."""
        now_s, error, way = time.monotonic(), reply.error, self._ways[plan.name]
        if reply.outputs is not None:
            with self._lock:
                way.is_proved = True
                self._note_times(plan, rows, reply.times)
                server_s = self._server_s(plan, rows, reply)
                self._estimate.note(now_s, dataclasses.replace(reply.exchange, server_s=server_s))
                self._breaker.succeed()
                self._epoch += 1
            return
        if reply.is_cut_off and is_late:
            with self._lock:
                self._estimate.note_cut_off(now_s, reply.exchange)
                if _is_moving(reply):
                    way.is_proved = True
                    self._breaker.succeed()
                self._epoch += 1
            return
        if isinstance(error, RequestError) and error.status == 404:
            self._disprove(way)
            return
        with self._lock:
            self._note_times(plan, rows, reply.times)
        if isinstance(error, RequestError) and is_overload(error):
            self._fail("the server says that it is loaded", at_least_s=error.retry_after_s or 1)
        else:
            self._fail(f"the server failed: {error}", way)

    def _note_times(self, plan: OffloadPlan, rows: int, times: ServerTimes) -> None:
        self._load = 0.0 if times.load is None else times.load
        self._wait_s = times.queue_s or 0.0
        if times.compute_s is not None and plan.costs.server_s > 0:
            self._compute.append((times.compute_s, plan.costs.server_s * rows))

    def _server_s(self, plan: OffloadPlan, rows: int, reply: Reply) -> float:
        times = reply.times
        if times.compute_s is not None:
            return times.compute_s + (times.queue_s or 0.0)
        moving_s = self._estimate.rtt_s or 0.0  # this server may be faster than the table says
        return min(plan.costs.server_s * rows, max(0.0, reply.exchange.elapsed_s - moving_s))

    # Probes

    def _probe_loop(self) -> None:
        while self._is_open:
            now_s = time.monotonic()
            if self._is_due(now_s):
                self._asked, took_s = self._count_requests(), 0.0
                try:
                    took_s = self._probe()
                except Exception as cause:  # whatever it is: without its thread the server is lost for good
                    wait_s = getattr(cause, "retry_after_s", None) or 0.0
                    self._fail(f"the server cannot be used: {cause}", at_least_s=wait_s)
                now_s = time.monotonic()
                self._schedule.note_probe(now_s, took_s)
                self._probed.set()
            self._write_status()
            tick_s = _BUSY_TICK_S if self._running or not self._breaker.is_closed else _TICK_S
            due_s = self._schedule.due_s - now_s
            self._wake.wait(due_s if 0 < due_s < tick_s else tick_s)
            self._wake.clear()

    def _count_requests(self) -> int:
        counts = self.counts
        return counts.local + counts.remote + counts.hedged + counts.failed

    def _is_due(self, now_s: float) -> bool:
        """Return whether a probe is worth its cost now; the link is not probed while nothing is asked."""
        late = self._late
        if late is not None and not late.done.is_set():  # both would be in each other's way
            return False
        if not self._breaker.is_closed:
            return self._breaker.may_probe(now_s)
        if not self._schedule.is_due(now_s, is_busy=self._running > 0):
            return False
        if self._find_unproved(now_s) is not None:
            return True
        if not self._schedule.may_spend(now_s) or self._count_requests() == self._asked:
            return False
        return self._could_gain(now_s)

    def _find_unproved(self, now_s: float) -> _Way | None:
        """Return the plan whose golden inputs are to be sent next, or None."""
        with self._lock:
            ways = [way for way in self._ways.values() if now_s >= way.retry_s]
            asked = self._preference.plan
            if asked is not None:
                ways = [way for way in ways if way.plan.name == asked]
            unproved = [way for way in ways if not way.is_proved and self._is_cheap(way, now_s)]
            if not unproved and not self._breaker.is_closed:
                unproved = ways  # any right answer shows that the server is well
            return min(unproved, key=lambda way: way.plan.costs.upload_bytes, default=None)

    def _could_gain(self, now_s: float) -> bool:
        """Return whether another plan would win on a very good link, and requests do not measure this one."""
        with self._lock:
            known, conditions = self._decisions.get(1), self._conditions(now_s)
            if known is None or self._preference.plan is not None or conditions.link is None:
                return False
            if known[1].plan.tail is not None and (self._estimate.is_claimed or not self._estimate.is_bound):
                return False
            link = LinkState(_MANY_BITS_PER_S, _MANY_BITS_PER_S, conditions.link.rtt_s, 1e9)
            best = dataclasses.replace(conditions, link=link)
            enough_s = known[1].predicted_s * (1 - HYSTERESIS)
            return any(predict_s(way.plan, best) < enough_s for way in self._ways.values())

    def _is_cheap(self, way: _Way, now_s: float) -> bool:
        """Return whether the link carries the golden inputs of a plan in reasonable time."""
        link = self._estimate.state(now_s)
        if link is None or self.local is None:
            return True
        conditions = dataclasses.replace(self._conditions(now_s), link=link)
        return predict_s(way.plan, conditions) < max(1.0, 4 * self._local_s(1))

    def _probe(self) -> float:
        """Prove a plan, or measure the link; return how long that took the link."""
        now_s = time.monotonic()
        way = self._find_unproved(now_s)
        if now_s - self._round_trip_s > _ROUND_TRIP_AGE_S or not self._breaker.is_closed:
            rtt_s, small_s = self._server.measure_round_trip(_PROBE_TIMEOUT_S)
            self._round_trip_s = time.monotonic()
            with self._lock:
                self._estimate.note_round_trip(self._round_trip_s, rtt_s)
                if not self._running or small_s - rtt_s < self._estimate.overhead_s:
                    self._estimate.overhead_s = small_s - rtt_s
        if way is None:
            return self._probe_link()
        try:
            return self._prove(way)
        except EdgekitError as cause:
            if _is_of_server(cause):
                raise
            self._disprove(way)  # so that the next probe tries another
            if not any(one.is_proved for one in self._ways.values()):
                raise
        return 0.0

    def _probe_link(self) -> float:
        """Measure the upload by bytes that cannot be compressed; golden inputs mostly shrink to nothing.

        Raises:
            EdgekitError: the server cannot be used.
        """
        with self._lock:
            wanted = int((self._estimate.up_bits_per_s or 0.0) * _PROBE_SEND_S / _BITS)
        if self._server.forget_slow_link():
            self._server.measure_round_trip(_PROBE_TIMEOUT_S)  # connects, which is no time of the link
        request = make_upload_probe(min(max(wanted, _LEAST_UPLOAD), _MOST_UPLOAD), self._server.fields)
        pending = self._server.send(request, _PROBE_TIMEOUT_S, lambda *_: None)
        pending.done.wait()
        reply = pending.reply
        if reply is None or not self._is_open:
            return 0.0
        self._spend(reply)
        if reply.error is not None and (_is_of_server(reply.error) or isinstance(reply.error, ReplyError)):
            raise reply.error
        with self._lock:
            self._load = reply.times.load or 0.0
            self._estimate.note_probe(time.monotonic(), reply.exchange)
            self._epoch += 1
        return reply.exchange.elapsed_s

    def _spend(self, reply: Reply) -> None:
        exchange = reply.exchange
        self._schedule.spend(time.monotonic(), exchange.upload_bytes + exchange.download_bytes)

    def _prove(self, way: _Way) -> float:
        """Run the golden inputs of a tail on the server, and compare; return how long the exchange took.

        Raises:
            EdgekitError: the server failed or answered wrongly.
        """
        golden = way.read_golden()
        request = way.prepare_golden(golden, self._server.fields)
        replies: list[Reply] = []
        pending = self._server.send(request, _PROBE_TIMEOUT_S, lambda _, reply: replies.append(reply))
        pending.done.wait()
        reply = replies[0]
        self._spend(reply)
        rows = len(next(iter(golden.inputs.values()))) if self._has_rows else 1
        if reply.outputs is None:
            status = reply.error.status if isinstance(reply.error, RequestError) else 0
            if status in (400, 415) and way.plan.compression != IDENTITY:
                self._send_plain(way)
                return self._prove(way)
            if status == 404:
                self._disprove(way)
            raise reply.error or BackendError("the server did not answer")
        test = golden.check(_Replied(reply.outputs))
        if not test.passed:
            self._disprove(way)
            wrong = next(check.message for check in test.checks if not check.passed)
            raise BackendError(f"{way.plan.tail} computes something else there: {wrong}")
        way.open_head()  # here, because a request of the application shall not wait for it
        self._note(way.plan, rows, reply, is_late=False)
        return reply.exchange.elapsed_s

    def _send_plain(self, way: _Way) -> None:
        """Predict and send a plan without compression from now on: not every server reads zstd."""
        with self._lock:
            table = self._tables[1]
            plans = [send_plain(one) if one.name == way.plan.name else one for one in table.plans]
            self._tables = {1: dataclasses.replace(table, plans=tuple(plans))}
            way.plan = send_plain(way.plan)
            self._epoch += 1

    def _write_status(self) -> None:
        decision = self.decision()
        with self._lock:
            state = self._estimate
            up, down, rtt_s = state.up_bits_per_s, state.down_bits_per_s, state.rtt_s
            switches = tuple(self._switches)
        if not self._is_open:  # its file is gone
            return
        table = self._tables[1]
        foreign = f"costs were measured on {table.device}; learned here: x{_ratio(self._device):.2f}"
        self._status.write(
            OffloadStatus(
                self._package.manifest.name,
                os.getpid(),
                str(self._server),
                decision.plan.name,
                decision.reason,
                up,
                rtt_s,
                down,
                foreign if table.device else "",
                dataclasses.replace(self.counts),
                switches,
            )
        )


def _show(text: str) -> str:
    """Return a text that holds a server's words, in a form that is fit for terminals, logs and files."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:_MOST_CAUSE])


def _is_moving(reply: Reply) -> bool:
    """Return whether the link was only slow as a request was ended from here."""
    return reply.is_cut_off and reply.exchange.upload_bytes > _LEAST_BYTES


def _is_of_server(error: EdgekitError) -> bool:
    """Return whether a probe failed for what no other plan can help: the way there, the token, the load."""
    if isinstance(error, RequestError):
        return is_overload(error) or error.status in (401, 403)
    return isinstance(error, TransportError) and not isinstance(error, ReplyError)


def _ratio(pairs: deque[tuple[float, float]]) -> float:
    """Return how many times longer runs took than their costs say; 1 while nothing is known."""
    known = tuple(pairs)
    expected = sum(pair[1] for pair in known)
    if expected <= 0:
        return 1.0
    return min(max(sum(pair[0] for pair in known) / expected, 1e-2), 1e3)


def _scale(table: CutTable, rows: int) -> CutTable:
    """Return the costs of a request of so many rows."""
    plans = []
    for plan in table.plans:
        costs = plan.costs
        scaled = dataclasses.replace(
            costs,
            device_s=costs.device_s * rows,
            server_s=costs.server_s * rows,
            upload_bytes=costs.upload_bytes * rows,
            download_bytes=costs.download_bytes * rows,
            plain_bytes=None if costs.plain_bytes is None else costs.plain_bytes * rows,
            compress_s=costs.compress_s * rows,
            decompress_s=costs.decompress_s * rows,
            device_j=None if costs.device_j is None else costs.device_j * rows,
        )
        plans.append(dataclasses.replace(plan, costs=scaled))
    return dataclasses.replace(table, plans=tuple(plans))


def _is_sure(outputs: Mapping[str, Array], escalation: Escalation) -> bool:
    """Return whether in every row the best class is far enough before the second."""
    scores = outputs[escalation.output]
    if scores.shape[-1] < 2:
        return True
    ordered = scores.copy()
    ordered.partition(scores.shape[-1] - 2, axis=-1)
    return bool((ordered[..., -1] - ordered[..., -2] >= escalation.least_margin).all())


def _encode(codec: MediaCodec, array: Array) -> Array:
    import numpy as np

    if array.ndim > codec.rank:
        if len(array) != 1:
            raise DataError(f"{codec.name} takes one row a request, got {len(array)}")
        array = array[0]
    return np.frombuffer(encode_media(codec, array), np.uint8)


def _bind(
    outputs: tuple[TensorSpec, ...], inputs: tuple[TensorSpec, ...], sent: Mapping[str, Array]
) -> tuple[TensorSpec, ...]:
    """Return outputs with the sizes that their named dimensions have in what is sent."""
    sizes: dict[str, int] = {}
    for spec in inputs:
        for name, size in zip(spec.shape, sent[spec.name].shape, strict=False):
            if isinstance(name, str):
                sizes.setdefault(name, size)
    return tuple(
        TensorSpec(
            spec.name, spec.dtype, tuple(sizes.get(d, d) if isinstance(d, str) else d for d in spec.shape)
        )
        for spec in outputs
    )
