"""A session that runs each request on the device, on a server or on both, depending on measurements.

The caller always gets correct outputs. If a reply is wrong or missing, or later than predicted, the model
also runs on the device. The first answer is used and the other run is cancelled. A server is used only after
it has answered golden inputs correctly. Until then, requests run on the device, if it can run the model.

`offload_state` chooses the plan, `server_prober` tests the server, and `offload_server` sends and receives.
"""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, Final

from edgekit_runtime.codecs.compression import has_zstd
from edgekit_runtime.errors import BackendError, DataError, EdgekitError, RefusedInputError, UnavailableError
from edgekit_runtime.offload.choose import PlanChoice
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import send_plain
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import Escalation
from edgekit_runtime.offload.offload_server import OffloadServer, Pending, Reply, TailRequest
from edgekit_runtime.offload.offload_status import Counts
from edgekit_runtime.offload.probe_schedule import ReplyWait
from edgekit_runtime.offload.session.offload_state import OffloadState, is_moving, show
from edgekit_runtime.offload.session.plan_runner import PlanRunner
from edgekit_runtime.offload.session.server_prober import ServerProber
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.sessions.row_independence import has_free_rows
from edgekit_runtime.sessions.session import Session, cancel_runs
from edgekit_runtime.tensors import Array

_LOOK_S: Final = 0.3  # between two checks of the connection, which cost microseconds
_RETRY_S: Final = 1.0  # pause before another try of a server on which this device depends


class _Hedge:
    """A local run beside a late request.

    Attributes:
        session: session that runs it, if a reply can end it; else, and until it begins, None.
        is_begun: whether the request is late, so that the local run begins or has begun.
        took_s: its time; None until it is over.
        is_waste: whether the server also answers, or would have; None until that is known.
    """

    __slots__ = ("is_begun", "is_ended", "is_waste", "session", "took_s")

    def __init__(self) -> None:
        self.session: Any = None
        self.is_begun = self.is_ended = False
        self.took_s: float | None = None
        self.is_waste: bool | None = None


class RemoteSession:
    """Runs a model on the device, on a server or divided between both, according to its cut table.

    `has_fixed_work` is always False, since the duration of a run may depend on the server.

    Attributes:
        local: The session that runs the whole model on the device, or None if the device cannot run it.
        state: The state of the link, the server and this device.
        is_concurrent: Whether several threads may call `run`. True if the local session allows it.
    """

    def __init__(
        self,
        package: OpenedPackage,
        table: CutTable,
        options: OffloadOptions,
        local: Session | None,
        threads: int | None,
        *,
        token: str | None = None,
    ) -> None:
        """Start with local runs, and test the server in the background.

        Args:
            package: The package, which `close` closes.
            table: The cut table of the package.
            options: The server and the options for choosing a plan.
            local: The session of the whole model, owned from now on. None if no plan runs it on the device.
            threads: The number of threads of a head, or None.
            token: The token that the server requires, or None.

        Raises:
            CutError: A plan does not compute all outputs of the model.
        """
        if not has_zstd():
            table = dataclasses.replace(table, plans=tuple(map(send_plain, table.plans)))
        source = package.manifest if local is None else local
        self.inputs, self.outputs = source.inputs, source.outputs
        self.local = local
        self.is_concurrent: bool = local is None or getattr(local, "is_concurrent", False)
        self._package, self._options = package, options
        self._has_rows = has_free_rows(source)
        runners = {plan.name: PlanRunner(plan, package, threads) for plan in table.plans if plan.tail}
        self.state = OffloadState(table, runners, options)
        self._server = OffloadServer(options.address, token)
        self._is_open, self._looked_s = True, float("-inf")
        self._prober = ServerProber(
            self.state,
            self._server,
            package.manifest.name,
            has_rows=self._has_rows,
            timeout_s=options.timeout_s,
        )

    @property
    def counts(self) -> Counts:
        return self.state.counts

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return a dict from output names to arrays for one set of inputs, as `Session.run` does.

        Raises:
            DataError: An array does not match its spec.
            RefusedInputError: The engine refused these inputs.
            BackendError: The engine failed, or the device cannot run the model and the server answers golden
                inputs incorrectly.
            UnavailableError: The device cannot run the model, and the server does not answer.
        """
        if not self._is_open:
            raise BackendError("backend 'offload': the session is closed")
        state, rows = self.state, self._count_rows(inputs)
        decision = self._choose_for(inputs, rows)
        state.running += 1
        try:
            if decision.plan.tail is None:
                state.counts.local += 1
                with state.lock:
                    state.hedges.earn(decision.predicted_s, decision.predicted_s)
                return self._run_local(inputs, rows)
            return self._run_split(decision, inputs, rows)
        finally:
            state.running -= 1
            if time.monotonic() >= state.schedule.due_s or state.estimate.is_suspect:
                state.wake.set()  # allows a probe between two requests

    def decision(self, rows: int = 1) -> PlanChoice:
        """Return the plan for the next request with `rows` rows, and the reason for it."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _LOOK_S:
            self._looked_s, self.state.connect_s = now_s, self._server.find_connect_s()
        return self.state.decision(rows)

    def wait_for_probe(self, timeout_s: float) -> bool:
        """Wait until the server has been probed for the first time.

        Returns:
            False if the time ran out first.
        """
        return self._prober.wait(timeout_s)

    def interrupt(self) -> None:
        """Make all runs in progress fail. May be called from any thread."""
        self._server.interrupt()
        for part in (self.local, *self.state.runners.values()):
            if (interrupt := getattr(part, "interrupt", None)) is not None:
                interrupt()

    def cancel_runs(self) -> None:
        """Make local runs in progress fail. Runs that wait for the server end by their own timeout."""
        for part in (self.local, *self.state.runners.values()):
            cancel_runs(part)

    def close(self) -> None:
        """Free the model and close the connections. Further calls have no effect."""
        if not self._is_open:
            return
        self._is_open = False
        self._prober.stop()
        self._server.close()
        self._prober.close()
        for runner in self.state.runners.values():
            runner.close()
        if self.local is not None:
            self.local.close()
        self._package.close()

    def _choose_for(self, inputs: Mapping[str, Array], rows: int) -> PlanChoice:
        """Return the choice for these inputs, without plans whose head would change them.

        Raises:
            DataError: they do not fit the model, or no plan of this package can carry them.
        """
        decision = self.decision(rows)
        if decision.plan.tail is None:
            return decision
        self._check_inputs(inputs)
        if self.state.runners[decision.plan.name].carries(inputs):
            return decision
        names = [name for name, runner in self.state.runners.items() if runner.carries(inputs)]
        other = self.state.decision_among(names, rows)
        if other is None:
            raise DataError(
                f"plan '{decision.plan.name}' cannot carry these inputs: they are not finite, or beyond the"
                " values of its samples, and no other plan runs on this device; plan it with more samples"
            )
        self.counts.uncoded += 1
        return other

    def _count_rows(self, inputs: Mapping[str, Array]) -> int:
        """Return the rows of a request; 1 if that does not matter, or if the inputs are wrong."""
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
                self.state.note_local_failure()
            raise
        self.state.note_local(time.monotonic() - began_s, rows)
        return outputs

    def _run_split(self, decision: PlanChoice, inputs: Mapping[str, Array], rows: int) -> dict[str, Array]:
        runner, began_s = self.state.runners[decision.plan.name], time.monotonic()
        try:
            head_outputs = runner.run_head(inputs)
            if decision.plan.escalation is not None and _is_sure(head_outputs, decision.plan.escalation):
                self.counts.local += 1
                return {spec.name: head_outputs[spec.name] for spec in self.outputs}
            if self.local is None and not runner.is_proved:
                return self._run_split(self._wait_for_proof(inputs, rows), inputs, rows)
            sent = runner.encode(inputs, head_outputs)
            head_s = time.monotonic() - began_s
            compression, fields = decision.plan.compression, self._server.fields
            request = runner.prepare(sent, self.outputs, compression=compression, fields=fields)
        except EdgekitError as cause:
            return self._run_instead(runner, cause, inputs, rows)
        self.state.note_head(decision.plan, head_s)
        reply = self._fetch(decision, request, inputs, rows, began_s=began_s)
        try:
            outputs = {**head_outputs, **runner.decode(reply)}
        except EdgekitError as cause:
            return self._run_instead(runner, cause, inputs, rows)
        return {spec.name: outputs[spec.name] for spec in self.outputs}

    def _run_instead(
        self, runner: PlanRunner, cause: EdgekitError, inputs: Mapping[str, Array], rows: int
    ) -> dict[str, Array]:
        """Return the outputs of a local run after a part of a plan failed on this device."""
        if self.local is None:
            raise cause
        outputs = self._run_local(inputs, rows)  # fails too if the inputs are to blame
        if not isinstance(cause, RefusedInputError):
            self.state.disprove(runner)
        return outputs

    def _wait_for_proof(self, inputs: Mapping[str, Array], rows: int) -> PlanChoice:
        """Return the choice for these inputs, with a plan that the server has proved.

        Raises:
            BackendError: the server computes something else.
            UnavailableError: it has proved none of the plans that carry these inputs.
        """
        state, until_s = self.state, time.monotonic() + self._options.timeout_s
        for _ in state.runners:
            self._prober.prove_now(max(0.0, until_s - time.monotonic()))
            decision = self._choose_for(inputs, rows)
            if state.runners[decision.plan.name].is_proved:
                return decision
        mismatches = [runner.mismatch for runner in state.runners.values()]
        if all(mismatches):
            raise BackendError(f"backend 'offload': {self._server}: {show(mismatches[0])}")
        raise self._cannot_run(decision.cause)

    def _cannot_run(self, cause: str) -> UnavailableError:
        """Return the error of a request that only the server could answer."""
        text = f"this device cannot run the model without {self._server}: {show(cause)}"
        return UnavailableError(f"backend 'offload': {text}", _RETRY_S)

    def _check_inputs(self, inputs: Mapping[str, Array]) -> None:
        """Check names, dtypes and shapes.

        Raises:
            DataError: they do not fit.
        """
        if inputs.keys() != {spec.name for spec in self.inputs}:
            names = [spec.name for spec in self.inputs]
            raise DataError(f"got inputs {sorted(inputs)}, expected {sorted(names)}")
        for spec in self.inputs:
            spec.check(inputs[spec.name])

    def _fetch(
        self,
        decision: PlanChoice,
        request: TailRequest,
        inputs: Mapping[str, Array],
        rows: int,
        *,
        began_s: float,
    ) -> dict[str, Array]:
        """Return the outputs of the tail, or the whole model's from a local run."""
        state, hedge, sent_s = self.state, _Hedge(), time.monotonic()
        local_s, expected_s = state.local_s(rows), state.reply_s(decision)
        state.sent_bytes += request.size_bytes

        def finish(pending: Pending, reply: Reply) -> None:
            if reply.outputs is not None:
                with state.lock:
                    state.hedges.note_reply(time.monotonic() - sent_s, expected_s)
            self._settle(hedge, is_waste=reply.outputs is not None or is_moving(reply))
            state.note_reply(decision.plan, reply, is_late=hedge.is_begun)
            # Publish before the look at the local run: a run that begins meanwhile then finds the reply.
            pending.publish(reply)
            if reply.outputs is not None and hedge.session is not None:
                hedge.is_ended = True
                hedge.session.interrupt()

        timeout_s = self._options.timeout_s
        if self.local is None or decision.is_forced:
            pending = self._server.send(request, timeout_s, finish)
            is_there = pending.done.wait(timeout_s)
            if self.local is None and not is_there:
                pending.abort()
                raise self._cannot_run(f"no answer within {timeout_s:g} s")
        else:
            patience_s = max(1.0, 4 * (expected_s + local_s))  # only a hedge ends the request sooner
            pending = self._server.send(request, patience_s, finish)
            is_there = _await_reply(pending, self._plan_wait(decision, request, rows, sent_s - began_s))
        if not is_there:
            return self._hedge(pending, decision.plan.name, inputs, rows, hedge)
        if self.local is None or (pending.reply is not None and pending.reply.outputs is not None):
            return self._take(pending, decision.plan.name)
        self.counts.failed += 1
        return self._run_local(inputs, rows)

    def _plan_wait(self, decision: PlanChoice, request: TailRequest, rows: int, spent_s: float) -> ReplyWait:
        return ReplyWait(
            self.state.allow_s(decision, rows, spent_s),
            self.state.local_s(rows),
            self.state.after_upload_s(decision),
            request.size_bytes,
            link=decision.conditions.link,
        )

    def _hedge(
        self, pending: Pending, plan: str, inputs: Mapping[str, Array], rows: int, hedge: _Hedge
    ) -> dict[str, Array]:
        """Run locally beside a late request, and return whichever answers first."""
        self.counts.hedged += 1
        hedge.is_begun = True
        share = getattr(self.local, "share", None)
        hedge.session = None if share is None else share()
        self._prober.late = pending
        try:
            if not _has_outputs(pending):
                began_s = time.monotonic()
                try:
                    outputs = self._run_local(inputs, rows, hedge)
                finally:
                    self._settle(hedge, took_s=time.monotonic() - began_s)
                if not pending.done.is_set():
                    if not self.state.estimate.is_claimed:
                        self.state.fail("the reply was late", self.state.runners[plan])
                    if not pending.is_sent:
                        pending.abort()  # the rest would only delay the next request
                return outputs
        except BackendError:
            pending.done.wait(self._options.timeout_s)
            if not _has_outputs(pending):
                raise
        return self._take(pending, plan)

    def _settle(self, hedge: _Hedge, *, took_s: float | None = None, is_waste: bool | None = None) -> None:
        """Charge a local run once both its time and the request's outcome are known.

        A local run in place of a silent or failing server is no waste, and costs no credit: the breaker opens
        soon, so such runs are few.
        """
        with self.state.lock:
            hedge.took_s = took_s if hedge.took_s is None else hedge.took_s
            hedge.is_waste = is_waste if hedge.is_waste is None else hedge.is_waste
            if hedge.is_waste and hedge.took_s is not None:
                self.state.hedges.spend(hedge.took_s)
                self.state.reconsider()

    def _take(self, pending: Pending, plan: str) -> dict[str, Array]:
        """Return the outputs of a reply.

        Raises:
            BackendError: the reply has none.
            UnavailableError: the reply has none, and the model cannot run here.
        """
        reply = pending.reply
        if reply is not None and reply.outputs is not None:
            self.state.count_remote(plan)
            return reply.outputs
        error = None if reply is None else reply.error
        if self.local is None:
            raise self._cannot_run(str(error)) from error
        raise BackendError(
            f"backend 'offload': the server {self._server} failed: {show(str(error))}"
        ) from error


def _await_reply(pending: Pending, wait: ReplyWait) -> bool:
    """Return whether the reply comes before it is time for a local run."""
    began_s, more_s = time.monotonic(), wait.look_s
    while not pending.done.wait(more_s):
        found_s = wait.more_s(time.monotonic() - began_s, pending.sent_bytes)
        if found_s is None:
            return False
        more_s = found_s
    return True


def _has_outputs(pending: Pending) -> bool:
    return pending.done.is_set() and pending.reply is not None and pending.reply.outputs is not None


def _is_sure(outputs: Mapping[str, Array], escalation: Escalation) -> bool:
    """Return whether in every row the best class is far enough above the second."""
    scores = outputs[escalation.output]
    if scores.shape[-1] < 2:
        return True
    ordered = scores.copy()
    ordered.partition(scores.shape[-1] - 2, axis=-1)
    return bool((ordered[..., -1] - ordered[..., -2] >= escalation.least_margin).all())
