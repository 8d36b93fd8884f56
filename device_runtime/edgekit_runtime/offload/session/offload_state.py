"""Tracks the link, the server and this device for a session, and chooses the plan of each request.

The request threads, the connection threads and the prober share this state. This module does no I/O.

Example: a request calls `decision`, which returns the current plan. The session sends the request for the
tail. When the reply arrives, `note_reply` updates the estimates of the link and the server, so the next call
of `decision` chooses again. If the request fails, the circuit breaker opens and `choose` no longer considers
server plans. The prober then sends golden inputs. The first correct reply closes the breaker.
"""

import dataclasses
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import Final, TypeAlias

from edgekit_runtime.errors import RequestError
from edgekit_runtime.offload.choose import PlanChoice, Preference, choose
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.latency_model import Conditions, LinkState, as_sent, predict_s, send_plain
from edgekit_runtime.offload.link_estimate import LinkEstimate
from edgekit_runtime.offload.offload_options import OffloadOptions
from edgekit_runtime.offload.offload_plan import OffloadPlan
from edgekit_runtime.offload.offload_server import NonFiniteError, Reply, ServerTimes, is_overload
from edgekit_runtime.offload.offload_status import Counts
from edgekit_runtime.offload.probe_schedule import (
    LEAST_MOVED_BYTES,
    CircuitBreaker,
    HedgePolicy,
    ProbeSchedule,
)
from edgekit_runtime.offload.session.plan_runner import PlanRunner

_RECENT: Final = 8  # number of local runs that give the device's load
_RECONSIDER: Final = 16  # local runs between two choices while nothing else changed
_LEAST_RUN_S: Final = 5e-4  # a shorter run says little about its machine
_SAID_S: Final = 120.0  # time for which a server's stated load counts: two pauses of probes
REFUSED_S: Final = 30.0  # pause until a server without a tail is asked for it again
_MANY_BITS_PER_S: Final = 1e10
_MOST_TABLES: Final = 16
_IN_DEBT: Final = "local runs beside late replies have used up their share of this device"
_MOST_CAUSE: Final = 300  # characters of a server's text
_SWITCHES: Final = 8

_Moment: TypeAlias = tuple[int, bool, float]  # epoch, whether the link is warm, time to connect


class OffloadState:
    """The state of the link, the server and this device, which determines the plan of each request.

    Attributes:
        runners: A dict from the name of each server plan to its runner.
        counts: The numbers of requests that ran locally, remotely or with a hedge, and that failed.
        sent_bytes: The total size of all requests to the server, in bytes.
        wake: An event that is set when the prober has work to do.
        lock: Protects the data about the link and the server. Local runs do not wait for it.
        hedges: Decides how long a request waits for its reply before the model also runs locally.
        connect_s: The time to connect for the next request, in seconds. 0 if a connection is open.
        switches: Descriptions of the latest plan changes.
    """

    def __init__(self, table: CutTable, runners: Mapping[str, PlanRunner], options: OffloadOptions) -> None:
        self.runners, self.counts = runners, Counts()
        self.running, self.sent_bytes = 0, 0
        self.wake, self.lock = threading.Event(), threading.Lock()
        self.estimate, self.breaker = LinkEstimate(), CircuitBreaker()
        self.schedule = ProbeSchedule(time.monotonic(), options.probe_bytes_per_hour)
        self.hedges = HedgePolicy(options.hedge_share, table.local.costs.device_s if table.local else 0.0)
        self.connect_s = self._wait_s = 0.0
        self._replied_s = float("-inf")  # last update of `_wait_s` and `_compute`
        self._load, self._load_s = 0.0, float("-inf")  # what the server stated last, and when
        self.switches: deque[str] = deque(maxlen=_SWITCHES)
        self.has_local_failed = False
        self._preference = Preference(
            options.prefer or table.objective, options.deadline_s, plan=options.plan
        )
        self._tables = {1: table}
        self._device: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._compute: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        self._decisions: dict[int, tuple[_Moment, PlanChoice]] = {}
        self._epoch = self._since = 0
        self._answered = ""  # plan of the server's last answer
        self._chance = random.Random()  # noqa: S311  # spreads devices over time; guards nothing

    # Choice

    @property
    def table(self) -> CutTable:
        """The cut table for requests with one row."""
        return self._tables[1]

    @property
    def asked_plan(self) -> str | None:
        """The name of the plan that was set with `ask_for`, or None."""
        return self._preference.plan

    def ask_for(self, plan: str | None) -> None:
        """Always use the named plan, or choose freely again if `plan` is None.

        While the named plan is not usable, the local plan runs, if there is one.
        """
        self._preference = dataclasses.replace(self._preference, plan=plan)
        self._epoch += 1

    def reconsider(self) -> None:
        self._epoch += 1

    def decision(self, rows: int = 1) -> PlanChoice:
        """Return the plan for the next request with `rows` rows, and the reason for it."""
        decision = self._decisions.get(rows)
        return decision[1] if decision is not None and decision[0] == self._moment() else self._decide(rows)

    def preview(self) -> PlanChoice:
        """Return the plan that the next request would use, and the reason, without changing the state."""
        with self.lock:
            decision = self._decisions.get(1)
            return decision[1] if decision is not None and decision[0] == self._moment() else self._choose(1)

    def _moment(self) -> _Moment:
        """Return the facts that a choice depends on; when they change, the choice is made again."""
        return self._epoch, self.estimate.is_warm(time.monotonic()), self.connect_s

    def _choose(self, rows: int, only: CutTable | None = None) -> PlanChoice:
        """Return the present choice; with `only`, a choice among these plans for one request."""
        previous = self._decisions.get(rows) if only is None else None
        preference, now_s = self._preference, time.monotonic()
        usable = {name for name, runner in self.runners.items() if runner.is_proved}
        is_in_debt = self.hedges.is_in_debt and not self.has_local_failed
        cause = self.breaker.cause or (_IN_DEBT if is_in_debt else "")
        if not cause and not usable:
            cause = next((runner.failure for runner in self.runners.values() if runner.failure), "")
        decision = choose(
            self._table(rows) if only is None else only,
            self.conditions(now_s),
            None if previous is None else previous[1],
            preference if only is None else dataclasses.replace(preference, plan=None),
            usable=usable,
            server_load=self._load if now_s - self._load_s < _SAID_S else 0.0,
            cause=cause,
        )
        return dataclasses.replace(decision, plan=as_sent(decision.plan, decision.conditions))

    def decision_among(self, names: Collection[str], rows: int) -> PlanChoice | None:
        """Choose between the local plan and the server plans in `names`, for a request with `rows` rows.

        Returns None if there is neither a local plan nor one of these server plans.
        """
        with self.lock:
            table = self._table(rows)
            plans = tuple(plan for plan in table.plans if plan.tail is None or plan.name in names)
            return self._choose(rows, dataclasses.replace(table, plans=plans)) if plans else None

    def _decide(self, rows: int) -> PlanChoice:
        with self.lock:
            moment, now_s = self._moment(), time.monotonic()
            previous, decision = self._decisions.get(rows), self._choose(rows)
            if len(self._decisions) > _MOST_TABLES:
                self._decisions.clear()
            self._decisions[rows] = (moment, decision)
            if previous is None or previous[1].plan.name != decision.plan.name:
                if previous is not None and previous[1].plan.name == self._answered:
                    self.schedule.restart(now_s)
                    self._answered = ""
                self.switches.append(f"{decision.plan.name}: {decision.reason}")
                self.wake.set()
            return decision

    def _table(self, rows: int) -> CutTable:
        if rows not in self._tables:
            if len(self._tables) > _MOST_TABLES:
                self._tables = {1: self._tables[1]}
            plans = [plan for plan in self.table.plans if rows == 1 or not plan.media]  # a file holds one row
            scaled = tuple(scale_plan(plan, rows) for plan in plans or self.table.plans)
            self._tables[rows] = dataclasses.replace(self.table, plans=scaled)
        return self._tables[rows]

    def send_plain(self, runner: PlanRunner) -> None:
        """Stop compressing the requests of a plan, and adjust its predicted times.

        This is for servers that cannot read zstd.
        """
        with self.lock:
            plans = [send_plain(plan) if plan.name == runner.plan.name else plan for plan in self.table.plans]
            self._tables = {1: dataclasses.replace(self.table, plans=tuple(plans))}
            runner.plan = send_plain(runner.plan)
            self._epoch += 1

    # Predictions

    def conditions(self, now_s: float) -> Conditions:
        link = self.estimate.state(now_s) if self.breaker.is_closed else None
        slowdown, wait_s = _ratio(self._compute), self._wait_s
        if (
            now_s - self._replied_s >= _SAID_S
        ):  # only replies state it, and there are none if the server was left because of it
            slowdown, wait_s = 1.0, 0.0
        return Conditions(link, self.device_slowdown, slowdown, wait_s + self.connect_s)

    @property
    def device_slowdown(self) -> float:
        """The median ratio of recent run times to the times in the table. 1 before the first run."""
        return _ratio(self._device)

    def local_s(self, rows: int) -> float:
        """Return the expected time of a local run in seconds, or 0 if the device cannot run the model."""
        plan = self.table.local
        return 0.0 if plan is None else plan.costs.device_s * rows * self.device_slowdown

    def reply_s(self, decision: PlanChoice) -> float:
        """Return the expected time in seconds from when the request is ready to the arrival of its reply."""
        plan = decision.plan
        whole = dataclasses.replace(plan, escalation=None) if plan.escalation is not None else plan
        slowdown = decision.conditions.device_slowdown
        remote_s = max(0.0, predict_s(whole, decision.conditions) - plan.costs.device_s * slowdown)
        return remote_s + max(plan.costs.request_s * slowdown, self.estimate.overhead_s)

    def after_upload_s(self, decision: PlanChoice) -> float:
        """Return the expected time in seconds from the end of the upload to the arrival of the reply."""
        costs, conditions = decision.plan.costs, decision.conditions
        server_s = costs.server_s * conditions.server_slowdown + conditions.server_wait_s
        return server_s + 2 * (self.estimate.rtt_s or 0.0)

    def allow_s(self, decision: PlanChoice, rows: int, spent_s: float) -> float:
        """Return how many seconds to wait for a reply before a local run starts, and add credit to `hedges`.

        The result is 0 if the bandwidth was raised by a probe and not yet confirmed by a request, and the
        credit covers a local run. `spent_s` is the time of this request so far.
        """
        local_s = self.local_s(rows)
        with self.lock:
            self.hedges.earn(decision.plan.costs.device_s * decision.conditions.device_slowdown, local_s)
        if self.estimate.is_claimed and self.hedges.may_hedge(local_s):
            return 0.0  # this request tests a probe's claim: both ways at once
        return self.hedges.allow_s(self.reply_s(decision), local_s, spent_s)

    def find_better(self, now_s: float) -> PlanRunner | None:
        """Return the plan that would be best with a very fast link and an idle server.

        The result is None if that plan is already in use or is local, if a plan was requested by name, if the
        link is unknown, or if the current requests measure the bandwidth. `now_s` is the time of
        `time.monotonic()`.
        """
        with self.lock:
            decision, conditions = self._decisions.get(1), self.conditions(now_s)
            if decision is None or self.asked_plan is not None or conditions.link is None:
                return None
            running = decision[1].plan
            if running.tail is not None and (self.estimate.is_claimed or not self.estimate.is_bound):
                return None
            link = LinkState(_MANY_BITS_PER_S, _MANY_BITS_PER_S, conditions.link.rtt_s, 1e9)
            best = choose(
                self.table,
                Conditions(link, conditions.device_slowdown, conditions.server_slowdown),
                preference=self._preference,
                usable={
                    name
                    for name, runner in self.runners.items()
                    if runner.is_proved or now_s >= runner.retry_s
                },
            )
            return None if best.plan.name == running.name else self.runners.get(best.plan.name)

    def is_cheap(self, runner: PlanRunner, now_s: float) -> bool:
        """Return whether a probe of this plan with golden inputs is expected to be fast.

        The limit is 1 s, or four local runs if these take longer. The result is also True if the link was not
        measured, or if the device cannot run the model. The caller must hold `lock`. `now_s` is the time of
        `time.monotonic()`.
        """
        link = self.estimate.state(now_s)
        if link is None or self.table.local is None:
            return True
        conditions = dataclasses.replace(self.conditions(now_s), link=link)
        return predict_s(runner.plan, conditions) < max(1.0, 4 * self.local_s(1))

    # Observations

    def count_requests(self) -> int:
        return self.counts.local + self.counts.remote + self.counts.hedged + self.counts.failed

    def count_remote(self, plan: str) -> None:
        self.counts.remote += 1
        self._answered = plan

    def note_local(self, took_s: float, rows: int) -> None:
        self.has_local_failed = False
        if (plan := self.table.local) is not None:
            self._device.append((took_s, (plan.costs.device_s - plan.costs.request_s) * rows))
        self._since += 1
        if self._since >= _RECONSIDER:
            self._since = 0
            self._epoch += 1

    def note_local_failure(self) -> None:
        self.has_local_failed = True
        self._epoch += 1

    def note_head(self, plan: OffloadPlan, took_s: float) -> None:
        """Record how many seconds the head and the codecs of a plan took for one request.

        The time to compress and send the request is not included.
        """
        planned_s = plan.costs.device_s - plan.costs.request_s - plan.costs.compress_s
        if plan.head is not None and planned_s > _LEAST_RUN_S:
            self._device.append((took_s, planned_s))

    def note_reply(self, plan: OffloadPlan, reply: Reply, *, is_late: bool, is_golden: bool = False) -> None:
        """Update the estimates from a reply. Called on the connection's thread.

        Args:
            plan: The plan, with the costs of this request.
            reply: The reply or the error.
            is_late: Whether a local run started before the reply arrived.
            is_golden: Whether the request held golden inputs. If so, it does not reset the plan's back-off.
        """
        now_s, error, runner = time.monotonic(), reply.error, self.runners[plan.name]
        if reply.outputs is not None:
            with self.lock:
                runner.is_proved = True
                if not is_golden:
                    runner.back_off.succeed()
                self._note_times(plan, reply.times)
                server_s = self._server_s(plan, reply)
                self.estimate.note(now_s, dataclasses.replace(reply.exchange, server_s=server_s))
                self.breaker.succeed()
                self._epoch += 1
            return
        if reply.is_cut_off and is_late:
            with self.lock:
                if reply.exchange.elapsed_s > 0:  # the connection was open
                    self.estimate.note_cut_off(reply.exchange)
                if is_moving(reply):
                    runner.is_proved = True
                    self.breaker.succeed()
                self._epoch += 1
            return
        if isinstance(error, RequestError) and error.status == 404:
            self.disprove(runner)
            return
        if isinstance(error, NonFiniteError):  # it may be correct, so the other plans stay
            with self.lock:
                self._leave(runner, str(error))
            return
        with self.lock:
            self._note_times(plan, reply.times)
        if isinstance(error, RequestError) and is_overload(error):
            with self.lock:
                pause_s = runner.back_off.fail(self._chance.random()) if self.breaker.is_closed else 0.0
            wait_s = max(error.retry_after_s or 1.0, pause_s)
            self.fail(f"the server takes no requests now: {error}", at_least_s=wait_s)
        else:
            self.fail(f"the server failed: {error}", runner)

    def fail(self, cause: str, runner: PlanRunner | None = None, at_least_s: float = 0.0) -> None:
        """Stop using the server until it answers golden inputs correctly.

        `runner` is the plan whose request failed. For `cause` and `at_least_s` see `CircuitBreaker.fail`.
        """
        with self.lock:
            if runner is not None:
                self._leave(runner, cause)
            self.breaker.fail(time.monotonic(), show(cause), self._chance.random(), at_least_s)
            self._epoch += 1

    def _leave(self, runner: PlanRunner, cause: str) -> None:
        """Drop a plan that failed the application, for longer each time in a row; under `lock`.

        Requests that fail together count once. If the device cannot run the model, there is no pause: each
        request waits for the proof.
        """
        if runner.is_proved:
            pause_s = runner.back_off.fail(self._chance.random())
            if self.table.local is not None:
                runner.retry_s = time.monotonic() + pause_s
        runner.is_proved, runner.failure = False, show(cause)
        self._epoch += 1

    def disprove(self, runner: PlanRunner) -> None:
        """Stop using a plan for at least 30 s.

        Called if the server lacks the plan or computes it incorrectly, or if its request cannot be sent.
        """
        with self.lock:
            runner.is_proved, runner.failure = False, ""
            runner.retry_s = time.monotonic() + REFUSED_S
            self._epoch += 1

    def note_load(self, load: float | None) -> None:
        """Record the load that the server reported, as a fraction of its capacity. None is ignored."""
        if load is not None:
            self._load, self._load_s = load, time.monotonic()

    def _note_times(self, plan: OffloadPlan, times: ServerTimes) -> None:
        self.note_load(times.load)
        if time.monotonic() - self._replied_s >= _SAID_S:
            self._compute.clear()
        self._replied_s = time.monotonic()
        self._wait_s = times.queue_s or 0.0
        planned_s = plan.costs.server_s - plan.costs.server_request_s - plan.costs.decompress_s
        if times.compute_s is not None and planned_s > _LEAST_RUN_S:
            self._compute.append((times.compute_s, planned_s))

    def _server_s(self, plan: OffloadPlan, reply: Reply) -> float:
        times = reply.times
        if times.compute_s is not None:
            return times.compute_s + (times.queue_s or 0.0)
        moving_s = self.estimate.rtt_s or 0.0  # this server may be faster than in the table
        return min(plan.costs.server_s, max(0.0, reply.exchange.elapsed_s - moving_s))


def show(text: str) -> str:
    """Return the first 300 characters of a server's text, with unprintable characters replaced by U+FFFD."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text[:_MOST_CAUSE])


def is_moving(reply: Reply) -> bool:
    """Return whether the link was still carrying bytes when this device aborted the request."""
    return reply.is_cut_off and reply.exchange.upload_bytes > LEAST_MOVED_BYTES


def _ratio(pairs: deque[tuple[float, float]]) -> float:
    """Return the median ratio of the times of runs to their costs; 1 while nothing is known."""
    ratios = [took_s / planned_s for took_s, planned_s in tuple(pairs) if planned_s > 0]
    return min(max(statistics.median(ratios), 1e-2), 1e3) if ratios else 1.0


def scale_plan(plan: OffloadPlan, rows: int) -> OffloadPlan:
    """Return a copy of the plan with the costs of a request that has `rows` rows."""
    costs = plan.costs
    scaled = dataclasses.replace(
        costs,
        device_s=(costs.device_s - costs.request_s) * rows + costs.request_s,
        server_s=(costs.server_s - costs.server_request_s) * rows + costs.server_request_s,
        upload_bytes=costs.upload_bytes * rows,
        download_bytes=costs.download_bytes * rows,
        plain_bytes=None if costs.plain_bytes is None else costs.plain_bytes * rows,
        compress_s=costs.compress_s * rows,
        decompress_s=costs.decompress_s * rows,
        device_j=None if costs.device_j is None else costs.device_j * rows,
    )
    escalation = plan.escalation
    if escalation is not None:  # one uncertain row sends all rows
        escalation = dataclasses.replace(escalation, share=1 - (1 - escalation.share) ** rows)
    return dataclasses.replace(plan, costs=scaled, escalation=escalation)
