"""The pages of samples from the field: orders, counts, pictures, a sample, and deletion."""

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.sample_content import SIDES, render_content
from edgekit_fleet.console.shell import Console, Section, with_query
from edgekit_fleet.operations import samples
from edgekit_fleet.operations.samples import SampleChoice, SampleSummary
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store import audit
from edgekit_runtime.errors import FleetError
from edgekit_runtime.protocol.samples import TRIGGERS

SECTION: Final = Section("Samples", "/samples", 55)
_PAGE: Final = 24
_SHOWN_S: Final = 3600.0  # after an entry in the audit log, pictures of its page need no entry for this time
_MAX_SHOWN: Final = 10_000
_FIELDS: Final = ("model", "device", "trigger", "order")
_MAX_FIELD: Final = 128


class SamplePages:
    """The pages of samples. One entry in the audit log records that a page with its pictures was viewed."""

    def __init__(self) -> None:
        self._viewed_s: dict[tuple[str, str], float] = {}

    def show_all(self, console: Console, request: Request) -> Response:
        """Return the page of sample orders, with the newest matching samples if the user may see samples."""
        query, actor = request.query_params, request.state.principal
        choice = _read_choice(query)
        items: list[SampleSummary] = []
        following, counts = None, dict[str, int]()
        if actor.may("sample"):
            with console.store.snapshot() as session:
                items, following = samples.page_samples(
                    session, choice, after=query.get("after", ""), limit=_PAGE
                )
                counts = samples.count_by_trigger(session, replace(choice, trigger=""))
            self._record(console, actor.name, [item.id for item in items])
        return console.render(
            request,
            "samples.html",
            collected=samples.read_status(console.store),
            items=items,
            counts=counts,
            choice=choice,
            triggers=TRIGGERS,
            next_page=with_query(request, after=following or "") if following else "",
            first_page=with_query(request, after="") if query.get("after") else "",
            link=lambda **changes: with_query(request, **{"after": "", **changes}),
        )

    def show_one(self, console: Console, request: Request) -> Response:
        sample_id, actor = request.path_params["id"], request.state.principal.name
        summary, sample = samples.read(console.store, open_vault(console), sample_id, actor=actor)
        self._note(actor, [sample_id])
        return console.render(
            request,
            "sample.html",
            item=summary,
            tensors=sample.header.tensors,
            input_bytes=len(sample.input),
            answer=json.dumps(sample.answer, indent=2, ensure_ascii=False)[:20_000],
        )

    def show_content(self, console: Console, request: Request) -> Response:
        """Return the content of a sample from `render_content`, never the original bytes."""
        sample_id, actor = request.path_params["id"], request.state.principal.name
        side = SIDES.get(request.query_params.get("size", ""), SIDES["small"])
        vault = open_vault(console)
        if self._viewed_s.get((actor, sample_id), float("-inf")) > time.monotonic() - _SHOWN_S:
            sample = samples.open_sample(vault, sample_id)
        else:
            _, sample = samples.read(console.store, vault, sample_id, actor=actor)
            self._note(actor, [sample_id])
        content = render_content(sample, side)
        return Response(content.data, media_type=content.media_type, headers={"cache-control": "no-store"})

    def _record(self, console: Console, actor: str, ids: list[str]) -> None:
        """Write to the audit log which samples a page shows."""
        if ids:
            with console.store.transaction() as session:
                audit.record(session, actor, "sample.view", "samples", ids=ids)
            self._note(actor, ids)

    def _note(self, actor: str, ids: list[str]) -> None:
        if len(self._viewed_s) > _MAX_SHOWN:
            self._viewed_s.clear()
        self._viewed_s.update(dict.fromkeys(((actor, sample_id) for sample_id in ids), time.monotonic()))


def delete_one(console: Console, request: Request) -> Response:
    choice = SampleChoice(ids=(request.path_params["id"],))
    samples.delete(console.store, open_vault(console), choice, actor=request.state.principal.name)
    return console.redirect(request, "/samples", "The sample is deleted.")


def delete_matching(console: Console, request: Request) -> Response:
    """Delete the samples that match the filter in the form, and redirect. The filter must not be empty."""
    form = request.state.form
    vault, choice = open_vault(console), _read_choice(form)
    count = samples.delete(console.store, vault, choice, actor=request.state.principal.name)
    return console.redirect(request, "/samples", f"{count} samples are deleted.")


def stop_order(console: Console, request: Request) -> Response:
    order = samples.stop(console.store, request.path_params["id"], actor=request.state.principal.name)
    return console.redirect(request, "/samples", f"Order {order.id} is stopped.")


def switch(console: Console, request: Request) -> Response:
    """Turn the collection of samples on or off, and set the number of days for which they are stored.

    The number of days is at most 3650.
    """
    form = request.state.form
    try:
        days = float(form.get("days", ""))
    except ValueError as cause:
        raise FleetError(f"days is {form.get('days', '')[:40]!r}, expected a number") from cause
    if not 0 < days <= 3650:
        raise FleetError(f"days is {days:g}, expected up to 3650")
    is_on = form.get("action") == "on"
    samples.switch(
        console.store,
        open_vault(console),
        is_on=is_on,
        days=days,
        actor=request.state.principal.name,
    )
    notice = "This fleet collects samples now." if is_on else "This fleet collects no more samples."
    return console.redirect(request, "/samples", notice)


def _read_choice(fields: Mapping[str, str]) -> SampleChoice:
    model, device, trigger, order = (fields.get(name, "").strip()[:_MAX_FIELD] for name in _FIELDS)
    return SampleChoice(model=model, device=device, trigger=trigger, order=order)


def open_vault(console: Console) -> SampleVault:
    return SampleVault(console.folder, console.settings)


def list_routes(console: Console) -> list[Route]:
    pages = SamplePages()
    return [
        console.get("/samples", pages.show_all),
        console.post("/samples/delete", delete_matching, "sample"),
        console.post("/samples/setting", switch, "admin"),
        console.post("/samples/orders/{id}/stop", stop_order, "sample"),
        console.get("/samples/{id}", pages.show_one, "sample"),
        console.get("/samples/{id}/content", pages.show_content, "sample"),
        console.post("/samples/{id}/delete", delete_one, "sample"),
    ]
