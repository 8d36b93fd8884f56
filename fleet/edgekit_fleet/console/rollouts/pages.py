"""The pages of rollouts: the list, a rollout, its devices, and the orders that a user can give."""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Final, cast
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.rollouts import queries
from edgekit_fleet.console.rollouts.gate_charts import make_chart
from edgekit_fleet.console.rollouts.rollout_log import RolloutLogs
from edgekit_fleet.console.shell import Console, Section, with_query
from edgekit_fleet.operations.rollouts import give_order, list_plain_returns
from edgekit_fleet.rollouts.decide import EXPOSED_STATES
from edgekit_fleet.rollouts.preview import read_number
from edgekit_fleet.rollouts.progress import Order
from edgekit_runtime.errors import FleetError

SECTION: Final = Section("Rollouts", "/rollouts", 40)
_ROLLOUTS: Final = 20
_MEMBERS: Final = 100
# The store has `offered` for devices that are started.
_EXPOSED: Final = tuple("offered" if state == "started" else state for state in EXPOSED_STATES)
_ORDERS: Final[Mapping[str, str]] = {
    # The manager carries an order out at its next turn. Until then the page shows the old state.
    "pause": "will pause",
    "resume": "will go on",
    "approve": "has its approval",
    "abort": "will go back",
}


class RolloutPages:
    """The pages of rollouts. They share the logs that were already read."""

    def __init__(self, closing: ExitStack) -> None:
        self._logs = RolloutLogs(closing)

    def show_all(self, console: Console, request: Request) -> Response:
        """Return a page of rollouts, newest first.

        The query can contain a time `before`, in seconds since 1970. Then only older rollouts are shown.
        """
        before = read_number(request.query_params.get("before", ""))
        with console.store.snapshot() as session:
            rows = queries.list_rollout_rows(session, limit=_ROLLOUTS + 1, before=before)
            page_rows = rows[:_ROLLOUTS]
            counts = queries.count_members(session, [row.name for row in page_rows if queries.is_open(row)])
        more = with_query(request, before=repr(page_rows[-1].created_at)) if len(rows) > _ROLLOUTS else ""
        return console.render(
            request, "rollouts.html", rows=page_rows, counts=counts, more=more, is_first=before is None
        )

    def show_one(self, console: Console, request: Request) -> Response:
        name = request.path_params["name"]
        with console.store.snapshot() as session:
            row = queries.find_rollout_row(session, name)
            waves = queries.list_waves(session, row)
            everything = queries.count_members(session, [name])[name]
            failures = queries.list_failures(session, row)
            refusals = queries.list_refusals(session, row)
        log_result = self._logs.find(console.store, name)
        log = log_result.result
        faults = [
            queries.Reason("faulty", fault, _FAULTS.get(fault, fault), count, devices)
            for fault, (count, devices) in (log.faults.items() if log else ())
        ]
        return console.render(
            request,
            "rollout.html",
            row=row,
            waves=waves,
            everything=everything,
            failures=faults + failures,
            refusals=refusals,
            gates=[(course, make_chart(course)) for course in log.courses] if log else [],
            log=log,
            is_current=log_result.is_current,
            kind=_MOMENT_KINDS,
        )

    def show_members(self, console: Console, request: Request) -> Response:
        name = request.path_params["name"]
        state, after = (request.query_params.get(name, "") for name in ("state", "after"))
        with console.store.snapshot() as session:
            row = queries.find_rollout_row(session, name)
            rows = queries.list_members(session, name, state=state or None, after=after, limit=_MEMBERS + 1)
        members = rows[:_MEMBERS]
        more = with_query(request, after=members[-1].device) if len(rows) > _MEMBERS else ""
        return console.render(
            request,
            "rollout_members.html",
            row=row,
            members=members,
            more=more,
            state=state,
            states=queries.MEMBER_STATES,
            is_first=not after,
        )

    def confirm_abort(self, console: Console, request: Request, problem: str = "") -> Response:
        """Return the page that describes the effect of an abort, and asks for the name of the rollout.

        If there is a `problem`, such as a wrong name, the page shows it and has the status 422.
        """
        name = request.path_params["name"]
        with console.store.snapshot() as session:
            row = queries.find_rollout_row(session, name)
            counts = queries.count_members(session, [name])[name].states
            plain = list_plain_returns(session, row)
        states = {state: counts.get(state, 0) for state in queries.MEMBER_STATES}
        return console.render(
            request,
            "rollout_abort.html",
            status=422 if problem else 200,
            row=row,
            problem=problem,
            exposed=sum(states[state] for state in _EXPOSED),
            states=states,
            plain=plain,
            verb="Roll back" if row.state == "succeeded" else "Abort",
        )

    def order(self, console: Console, request: Request) -> Response:
        """Give a rollout the order in the form, and redirect to the rollout.

        For an abort, the form must contain the name of the rollout. Otherwise, the page that asks for the
        name is returned.

        Raises:
            FleetError: The order is unknown or not possible now.
        """
        name, form = request.path_params["name"], request.state.form
        order = form.get("order", "")
        if order not in _ORDERS:
            raise FleetError(f"order {order!r} is unknown, expected one of: {', '.join(_ORDERS)}")
        if order == "abort" and form.get("confirm", "").strip() != name:
            problem = f"To confirm, write the rollout's name: {name}"
            return self.confirm_abort(console, request, problem)
        note = form.get("note", "").strip()[:500]
        give_order(
            console.store,
            name,
            cast(Order, order),
            request.state.principal.name,
            note=note,
            allow_plain="allow_plain" in form,
        )
        return console.redirect(request, f"/rollouts/{quote(name)}", f"{name} {_ORDERS[order]}.")


_FAULTS: Final = {
    "crash-loop": "the version crashed again and again, and the device went back",
    "not-finite": "the version answered NaN or infinity to finite inputs",
    "fallback": "the device fell back to the old version",
}
_MOMENT_KINDS: Final[Mapping[str, str]] = {
    "begin": "moving",
    "start": "moving",
    "retry": "moving",
    "join": "moving",
    "ask": "pause",
    "pause": "pause",
    "succeed": "good",
    "abort": "bad",
    "order": "idle",
    "withdraw": "stop",
    "evidence-pass": "good",
    "evidence-unclear": "idle",
    "evidence-stop": "bad",
}


def list_routes(console: Console) -> list[Route]:
    rollouts = RolloutPages(console.closing)
    return [
        console.get("/rollouts", rollouts.show_all),
        console.get("/rollouts/{name}", rollouts.show_one),
        console.get("/rollouts/{name}/devices", rollouts.show_members),
        console.get("/rollouts/{name}/abort", rollouts.confirm_abort, "rollout"),
        console.post("/rollouts/{name}/order", rollouts.order, "rollout"),
    ]
