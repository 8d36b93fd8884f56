"""The pages of releases: their packages with evidence, the devices that run them, and withdrawal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from sqlalchemy import select
from sqlalchemy.orm import Session
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from edgekit_fleet.console.rollouts import queries
from edgekit_fleet.console.shell import Console, Section, with_query
from edgekit_fleet.operations.releases import (
    ReleaseSummary,
    make_release,
    read_base_versions,
    summarize_releases,
    withdraw_release,
)
from edgekit_fleet.rollouts.gate_table import MIN_AGREEMENT
from edgekit_fleet.store.tables import ReleasePackageRow, ReleaseRow, RolloutRow
from edgekit_fleet.web.uploads import MAX_PACKAGE_BYTES, UploadedForm
from edgekit_runtime.errors import EdgekitError, FleetError, OutputError
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX, list_keys
from edgekit_runtime.trust.trust_store import TrustStore

SECTION: Final = Section("Releases", "/releases", 30)
_RELEASES: Final = 20
_ROLLOUTS: Final = 20
_NOTE_CHARS: Final = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseView:
    """A release in the list.

    Attributes:
        models: A dict from a model with its version, such as `digits 1.2.0`, to its device classes.
        bytes: The size of the largest package.
        rollouts: The name and state of each rollout, newest first.
    """

    summary: ReleaseSummary
    models: Mapping[str, Sequence[str]]
    bytes: int
    rollouts: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class PackageEvidence:
    """A package with its evidence.

    Attributes:
        score: The score that the packager measured, as text, or empty.
        agreement: The minimum agreement with the previous version.
        deltas: The old version and the size in bytes of each delta. An unknown version is shown as eight
            digits of the old package's digest. The version is empty for a file that is compressed without an
            old package.
    """

    row: ReleasePackageRow
    score: str
    agreement: float
    deltas: Sequence[tuple[str, int]]


def show_releases(console: Console, request: Request) -> Response:
    """Return a page of the releases that were made before the time `before` in the query, newest first."""
    text = request.query_params.get("before", "")
    statement = select(ReleaseRow).order_by(ReleaseRow.created_at.desc()).limit(_RELEASES + 1)
    try:
        statement = statement.where(ReleaseRow.created_at < float(text)) if text else statement
    except ValueError as cause:
        raise FleetError(f"before: {text[:40]!r} is no time") from cause
    with console.store.snapshot() as session:
        rows = session.scalars(statement).all()
        page_rows = rows[:_RELEASES]
        views = _view_releases(session, page_rows)
    more = with_query(request, before=repr(page_rows[-1].created_at)) if len(rows) > _RELEASES else ""
    return console.render(request, "releases.html", releases=views, more=more, is_first=not text)


def show_release(console: Console, request: Request) -> Response:
    return _render(console, request, "release.html")


def show_form(console: Console, request: Request) -> Response:
    """Return the form that makes a release from packages."""
    console.folder.check_repository()
    return _render_form(console, request, {})


def release(console: Console, request: Request) -> Response:
    """Make a release from the uploaded packages, and redirect to it. An error is shown in the form."""
    form: UploadedForm = request.state.form
    try:
        summary = make_release(
            console.folder,
            console.store,
            TrustStore.from_folder(find_keys_folder()),
            form.files,
            actor=request.state.principal.name,
            name=form.fields.get("name", "").strip(),
            note=form.fields.get("note", "").strip()[:_NOTE_CHARS],
            min_agreement=_read_agreement(form.fields.get("min_agreement", "")),
            encrypt="encrypt" in form.fields,
            allow_plain="allow_plain" in form.fields,
        )
    except OutputError:
        raise
    except EdgekitError as error:
        # Not the paths on the server: the person knows the files by their names.
        problem = str(error).replace(f"{form.folder}/", "")
        return _render_form(console, request, form.fields, problem)
    notice = f"{summary.name} is released. Devices get it by a rollout."
    return console.redirect(request, f"/releases/{quote(summary.name)}", notice)


def _render_form(
    console: Console, request: Request, fields: Mapping[str, str], problem: str = ""
) -> Response:
    return console.render(
        request,
        "release_new.html",
        status=422 if problem else 200,
        fields=fields,
        problem=problem,
        encrypts="encrypt" in fields if problem else console.folder.read_settings().encrypts,
        keys=[path.name.removesuffix(PUBLIC_KEY_SUFFIX) for path in list_keys(find_keys_folder())],
        most_bytes=MAX_PACKAGE_BYTES,
    )


def _read_agreement(text: str) -> float | None:
    try:
        share = float(text.strip().replace(",", ".")) if text.strip() else None
    except ValueError as cause:
        raise FleetError(f"least agreement: {text[:40]!r} is no number") from cause
    if share is not None and share not in MIN_AGREEMENT.range:
        raise FleetError(f"least agreement: {share:g}, expected {MIN_AGREEMENT.range}")
    return share


def confirm_withdrawal(console: Console, request: Request) -> Response:
    """Return the page that describes the effect of a withdrawal."""
    return _render(console, request, "release_withdraw.html")


def withdraw(console: Console, request: Request) -> Response:
    """Withdraw a release, and redirect to it. The form must contain the release's name as confirmation."""
    name = request.path_params["name"]
    if request.state.form.get("confirm", "").strip() != name:
        problem = f"To confirm, write the release's name: {name}"
        return _render(console, request, "release_withdraw.html", problem)
    withdraw_release(console.folder, console.store, name, request.state.principal.name)
    return console.redirect(request, f"/releases/{quote(name)}", f"{name} is withdrawn.")


def _render(console: Console, request: Request, template: str, problem: str = "") -> Response:
    name = request.path_params["name"]
    with console.store.snapshot() as session:
        row = session.get(ReleaseRow, name)
        if row is None:
            raise FleetError(f"no release '{name}'")
        packages = _list_packages(session, name)
        rollouts = queries.list_rollout_rows(session, limit=_ROLLOUTS, release=name)
        counts = queries.count_members(session, [rollout.name for rollout in rollouts])
    return console.render(
        request,
        template,
        status=422 if problem else 200,
        row=row,
        packages=packages,
        is_encrypted=any(package.row.key_id for package in packages),
        rollouts=rollouts,
        counts=counts,
        open=[rollout.name for rollout in rollouts if queries.is_open(rollout)],
        problem=problem,
    )


def _view_releases(session: Session, rows: Sequence[ReleaseRow]) -> list[ReleaseView]:
    rollouts: dict[str, list[tuple[str, str]]] = {row.name: [] for row in rows}
    for release, name, state in session.execute(
        select(RolloutRow.release, RolloutRow.name, RolloutRow.state)
        .where(RolloutRow.release.in_(rollouts))
        .order_by(RolloutRow.created_at.desc())
    ):
        rollouts[release].append((name, state))
    views = []
    for summary in summarize_releases(session, rows):
        models: dict[str, list[str]] = {}
        for model, version, target, _ in summary.packages:
            models.setdefault(f"{model} {version}", []).append(target)
        largest = max((size_bytes for *_, size_bytes in summary.packages), default=0)
        views.append(
            ReleaseView(summary=summary, models=models, bytes=largest, rollouts=rollouts[summary.name])
        )
    return views


def _list_packages(session: Session, release: str) -> list[PackageEvidence]:
    rows = session.scalars(
        select(ReleasePackageRow)
        .where(ReleasePackageRow.release == release)
        .order_by(ReleasePackageRow.model, ReleasePackageRow.target)
    ).all()
    versions = read_base_versions(session, rows)
    return [
        PackageEvidence(
            row,
            _describe_score(row.needs.get("score")),
            row.needs.get("min_agreement") or MIN_AGREEMENT.default,
            [
                (versions.get(delta["from_sha256"], delta["from_sha256"][:8]), int(delta["size_bytes"]))
                for delta in row.deltas
            ],
        )
        for row in rows
    ]


def _describe_score(score: Any) -> str:
    """Return the packager's evidence in words. It is signed but not validated, so fields may be missing."""
    if not isinstance(score, Mapping) or not isinstance(score.get("value"), (int, float)):
        return ""
    parts = [f"{score.get('metric', 'score')} {score['value']:.4g}"]
    if isinstance(score.get("source_value"), (int, float)):
        parts.append(f"source model {score['source_value']:.4g}")
    if isinstance(score.get("samples"), int):
        parts.append(f"{score['samples']:,} {score.get('samples_kind', '')} samples".replace("  ", " "))
    return ", ".join(parts)


def list_routes(console: Console) -> list[Route]:
    return [
        console.get("/releases", show_releases),
        Route("/releases", console.upload(release, "release"), methods=["POST"]),
        console.get("/releases/new", show_form, "release"),
        console.get("/releases/{name}", show_release),
        console.get("/releases/{name}/withdraw", confirm_withdrawal, "release"),
        console.post("/releases/{name}/withdraw", withdraw, "release"),
    ]
