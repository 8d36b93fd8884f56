"""Tests plans with golden inputs and measures the link, on a separate thread."""

import dataclasses
import os
import threading
import time
from collections import deque
from typing import Final

from edgekit_runtime.codecs.compression import IDENTITY
from edgekit_runtime.errors import BackendError, EdgekitError, RequestError, TransportError
from edgekit_runtime.offload.offload_server import (
    OffloadServer,
    Pending,
    Reply,
    ReplyError,
    is_overload,
    make_upload_probe,
)
from edgekit_runtime.offload.offload_status import OffloadStatus, StatusFile
from edgekit_runtime.offload.session.offload_state import OffloadState, scale_plan
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.system.processor_speed import find_cpu

_PROBE_TIMEOUT_S: Final = 2.0
_PROBE_SEND_S: Final = 0.04  # time of a probe on the estimated link
_LEAST_UPLOAD: Final = 12 << 10  # bytes of a probe that TCP sends at once
_MOST_UPLOAD: Final = 64 << 10
_BITS: Final = 8
_ROUND_TRIP_AGE_S: Final = 10.0
_LEAST_ROUND_TRIP_AGE_S: Final = 1.0
_LONGER: Final = 1.1  # multiple of the known round trip
_SMALL_BYTES: Final = 4_000  # requests of this size do not delay other packets
_NO_CODING: Final = (400, 415, 501)  # statuses of servers that cannot read zstd. Triton's is 501
_CLOSE_S: Final = 0.2  # wait for a probe to end
_TICK_S: Final = 0.25
_BUSY_TICK_S: Final = 0.1


class ServerProber:
    """Probes a server in the background until `stop` is called.

    Attributes:
        late: The most recent request with a late reply. No probe is sent until this request ends.
    """

    def __init__(
        self, state: OffloadState, server: OffloadServer, model: str, *, has_rows: bool, timeout_s: float
    ) -> None:
        """Start the thread.

        Args:
            state: The state of the session, which probes update.
            server: The server.
            model: The name of the package, for `edgekit-device offload status`.
            has_rows: Whether each row of the golden inputs counts as a request.
            timeout_s: The timeout of a test while requests wait for it, since the device cannot run the
                model.
        """
        self.late: Pending | None = None
        self._state, self._server, self._model, self._has_rows = state, server, model, has_rows
        self._is_open, self._probed = True, threading.Event()
        self._prove_s = timeout_s if state.table.local is None else _PROBE_TIMEOUT_S
        self._waiting: deque[threading.Event] = deque()  # wait for the end of a proof
        self._round_trip_s = float("-inf")  # last measurement
        self._request_count = -1  # number of requests before the last probe
        self._status, self._cpu = StatusFile(id(self)), find_cpu()
        self._thread = threading.Thread(target=self._run, name="edgekit-prober", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait until the server has been probed for the first time.

        Returns:
            False if the time ran out first.
        """
        return self._probed.wait(timeout_s)

    def prove_now(self, timeout_s: float) -> None:
        """Send the golden inputs of the next plan at once, without waiting for the end of a pause.

        Blocks until the outcome is known, for at most `timeout_s` seconds.
        """
        proof = threading.Event()
        self._waiting.append(proof)
        self._state.wake.set()
        proof.wait(timeout_s)

    def stop(self) -> None:
        """Tell the thread to stop. The caller must then close the server."""
        self._is_open = False
        self._state.wake.set()

    def close(self) -> None:
        self._thread.join(_CLOSE_S)  # it may be connecting in vain, and ends by itself then
        self._status.close()

    def _run(self) -> None:
        state = self._state
        while self._is_open:
            now_s, waiting = time.monotonic(), len(self._waiting)
            is_due = self._find_unproved(now_s) is not None if waiting else self._is_due(now_s)
            if is_due:
                self._request_count, took_s = state.count_requests(), 0.0
                try:
                    took_s = self._probe()
                except Exception as cause:  # without this thread the server would be lost for good
                    wait_s = getattr(cause, "retry_after_s", None) or 0.0
                    state.fail(f"the server cannot be used: {cause}", at_least_s=wait_s)
                now_s = time.monotonic()
                state.schedule.note_probe(now_s, took_s)
                self._probed.set()
            for _ in range(waiting):
                self._waiting.popleft().set()
            self._write_status()
            tick_s = _BUSY_TICK_S if state.running or not state.breaker.is_closed else _TICK_S
            due_s = state.schedule.due_s - now_s
            state.wake.wait(due_s if 0 < due_s < tick_s else tick_s)
            state.wake.clear()

    def _is_due(self, now_s: float) -> bool:
        """Return whether a probe is worth its cost now; without requests the link is not probed."""
        late, state = self.late, self._state
        if late is not None and not late.done.is_set():  # each would delay the other
            return False
        if not state.breaker.is_closed:
            return state.breaker.may_probe(now_s) and self._find_unproved(now_s) is not None
        if self._is_round_trip_due(now_s):
            return True
        if not state.schedule.is_due(now_s, is_busy=state.running > 0):
            return False
        if self._find_unproved(now_s) is not None:
            return True
        if not state.schedule.may_spend(now_s) or state.count_requests() == self._request_count:
            return False
        if state.find_better(now_s) is None:
            state.schedule.postpone(now_s)
            return False
        return True

    def _is_round_trip_due(self, now_s: float) -> bool:
        """Return whether a fall of the bandwidth may be a longer round trip, which is cheap to measure."""
        state = self._state
        is_new = now_s - self._round_trip_s < _LEAST_ROUND_TRIP_AGE_S
        return (
            state.estimate.is_suspect and not state.running and not is_new and state.schedule.may_spend(now_s)
        )

    def _find_unproved(self, now_s: float) -> PlanRunner | None:
        """Return the plan whose golden inputs to send next, or None."""
        state = self._state
        with state.lock:
            runners = [runner for runner in state.runners.values() if now_s >= runner.retry_s]
            preferred = [runner for runner in runners if runner.plan.name == state.asked_plan]
            # If a request waits although the requested plan is proved, that plan cannot carry it.
            if state.asked_plan is not None and not (
                self._waiting and all(runner.is_proved for runner in preferred)
            ):
                runners = preferred
            unproved = [
                runner for runner in runners if not runner.is_proved and state.is_cheap(runner, now_s)
            ]
            if not unproved and not state.breaker.is_closed:
                unproved = runners  # any right answer shows that the server works
            return min(unproved, key=lambda runner: runner.plan.costs.upload_bytes, default=None)

    def _probe(self) -> float:
        """Prove a plan, or measure the link; return the time that the link was used."""
        now_s, state = time.monotonic(), self._state
        runner, is_suspect = self._find_unproved(now_s), state.estimate.is_suspect
        if is_suspect or now_s - self._round_trip_s > _ROUND_TRIP_AGE_S or not state.breaker.is_closed:
            self._measure_round_trip()
        if runner is None:
            return 0.0 if is_suspect else self._probe_link()
        try:
            return self._prove(runner)
        except EdgekitError as cause:
            if _is_of_server(cause):
                raise
            state.disprove(runner)  # the next probe then tries another plan
            if not any(runner.is_proved for runner in state.runners.values()):
                raise
        return 0.0

    def _measure_round_trip(self) -> None:
        """Measure the round trip.

        Raises:
            EdgekitError: the server cannot be used.
        """
        state, was_busy, before = self._state, self._state.running > 0, self._state.sent_bytes
        rtt_s, small_s = self._server.measure_round_trip(_PROBE_TIMEOUT_S)
        self._round_trip_s = time.monotonic()
        is_beside = was_busy or state.sent_bytes - before > _SMALL_BYTES
        with state.lock:
            estimate, known_s = state.estimate, state.estimate.rtt_s
            if known_s is not None:
                # TCP's average follows slowly, and may include large bodies; a busy device is late itself.
                waited_s = small_s - estimate.overhead_s
                is_longer = min(rtt_s, waited_s) > known_s * _LONGER
                rtt_s = waited_s if is_longer else min(rtt_s, known_s)
            estimate.note_round_trip(rtt_s, is_beside=is_beside)
            if not state.running or small_s - rtt_s < estimate.overhead_s:
                estimate.overhead_s = small_s - rtt_s

    def _probe_link(self) -> float:
        """Measure the upload by bytes that cannot be compressed; golden inputs mostly compress well.

        Raises:
            EdgekitError: the server cannot be used.
        """
        state, runner = self._state, self._state.find_better(time.monotonic())
        with state.lock:
            payload_bytes = int((state.estimate.up_bits_per_s or 0.0) * _PROBE_SEND_S / _BITS)
        if self._server.forget_slow_link():
            self._server.measure_round_trip(_PROBE_TIMEOUT_S)  # connects, which is not the link's time
        size_bytes = min(max(payload_bytes, _LEAST_UPLOAD), _MOST_UPLOAD)
        request = make_upload_probe(size_bytes, self._server.fields, runner.plan.tail if runner else None)
        pending = self._server.send(request, _PROBE_TIMEOUT_S, lambda *_: None)
        pending.done.wait()
        reply = pending.reply
        if reply is None or not self._is_open:
            return 0.0
        self._spend(reply)
        if reply.error is not None and (_is_of_server(reply.error) or isinstance(reply.error, ReplyError)):
            raise reply.error
        with state.lock:
            state.note_load(reply.times.load)
            state.estimate.note_probe(time.monotonic(), reply.exchange)
        state.reconsider()
        return reply.exchange.elapsed_s

    def _spend(self, reply: Reply) -> None:
        exchange = reply.exchange
        self._state.schedule.spend(time.monotonic(), exchange.upload_bytes + exchange.download_bytes)

    def _prove(self, runner: PlanRunner) -> float:
        """Run the golden inputs of a tail on the server, and compare; return the time of the exchange.

        Raises:
            EdgekitError: the server failed or answered wrongly.
        """
        state, golden = self._state, runner.read_golden()
        request = runner.prepare_golden(golden, self._server.fields)
        replies: list[Reply] = []
        pending = self._server.send(request, self._prove_s, lambda _, reply: replies.append(reply))
        pending.done.wait()
        reply = replies[0]
        self._spend(reply)
        rows = len(next(iter(golden.inputs.values()))) if self._has_rows else 1
        if reply.outputs is None:
            status = reply.error.status if isinstance(reply.error, RequestError) else 0
            if status in _NO_CODING and runner.plan.compression != IDENTITY:
                state.send_plain(runner)
                return self._prove(runner)
            if status == 404:
                state.disprove(runner)
            raise reply.error or BackendError("the server did not answer")
        # Of the first row: it shows that the server has this package, which tests all rows itself.
        wrong = [check.message for check in golden.compare(reply.outputs) if not check.passed]
        if wrong:
            state.disprove(runner)
            runner.mismatch = f"{runner.plan.tail} computes something else there: {wrong[0]}"
            raise BackendError(runner.mismatch)
        runner.mismatch = ""
        runner.open_head()  # now, so that no request of the application waits for it
        state.note_reply(scale_plan(runner.plan, rows), reply, is_late=False, is_golden=True)
        return reply.exchange.elapsed_s

    def _write_status(self) -> None:
        state, decision = self._state, self._state.preview()
        with state.lock:
            link = state.estimate
            up, down, rtt_s = link.up_bits_per_s, link.down_bits_per_s, link.rtt_s
            switches = tuple(state.switches)
        if not self._is_open:  # its file is removed
            return
        self._status.write(
            OffloadStatus(
                model=self._model,
                process=os.getpid(),
                server=str(self._server),
                plan=decision.plan.name,
                reason=decision.reason,
                up_bits_per_s=up,
                rtt_s=rtt_s,
                down_bits_per_s=down,
                device=self._explain_costs(),
                counts=dataclasses.replace(state.counts),
                switches=switches,
            )
        )

    def _explain_costs(self) -> str:
        """Return a note if the costs are another processor's, else an empty text."""
        device = self._state.table.device
        if not device or device.startswith(f"{self._cpu}, "):
            return ""
        learned = f"its runs take x{self._state.device_slowdown:.2f} of that"
        return f"the plans were measured on another device, {device}; this is {self._cpu}, {learned}"


def _is_of_server(error: EdgekitError) -> bool:
    """Return whether a probe failed for a reason common to all plans: connection, token or load."""
    if isinstance(error, RequestError):
        return is_overload(error) or error.status in (401, 403)
    return isinstance(error, TransportError) and not isinstance(error, ReplyError)
