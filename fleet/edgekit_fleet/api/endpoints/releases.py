"""Endpoints of packages, releases and rollouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from edgekit_fleet.access.principal import Principal
from edgekit_fleet.api.endpoints.endpoint import DEFAULT_LIMIT, Fleet, Named, PageLimit, WaitSeconds, endpoint
from edgekit_fleet.operations import releases, rollouts
from edgekit_fleet.operations.releases import ReleaseSummary
from edgekit_fleet.operations.rollouts import PlanRollout, RolloutPlan, RolloutSummary, StartRollout
from edgekit_fleet.rollouts.gate_table import MIN_AGREEMENT
from edgekit_fleet.rollouts.progress import Order
from edgekit_fleet.rollouts.replay import Difference
from edgekit_fleet.rollouts.runner import OPEN_STATES
from edgekit_fleet.store.database import Store
from edgekit_fleet.web.uploads import remove_old_uploads
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import FleetError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore

Page = TypeVar("Page", "ReleaseList", "RolloutList")


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPackage:
    """A package to upload.

    Attributes:
        sha256: The SHA-256 of the file, in hexadecimal digits.
        file: The path of the file.
    """

    sha256: str
    file: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadedPackage:
    """An uploaded package, which can be released within a day.

    Attributes:
        sha256, size_bytes: The SHA-256 and size of the file.
        model, version, target: The model, version and target of the package.
    """

    sha256: str
    size_bytes: int
    model: str
    version: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeRelease:
    """A new release.

    Attributes:
        packages: The SHA-256 of uploaded packages, at most one for each model and device class.
        name: The name of the release. If empty, it is today's date and a number.
        note: A note to show.
        min_agreement: The minimum agreement with the previous version. Lower it if answers should change.
        encrypt: Whether to encrypt the packages. By default, the settings of the fleet decide.
        allow_plain: Whether plain packages are allowed for models that had an encrypted release.
    """

    packages: tuple[str, ...]
    name: str = ""
    note: str = ""
    min_agreement: Annotated[float | None, MIN_AGREEMENT.range] = None
    encrypt: bool | None = None
    allow_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ListPage:
    """Which page of a list to return.

    Attributes:
        limit: The maximum number of items on the page.
        after: The name of the last item of the previous page. The newest item comes first.
    """

    limit: PageLimit = DEFAULT_LIMIT
    after: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseList:
    """A page of releases, newest first.

    Attributes:
        items: The releases.
        next: The value of `after` for the next page, or null on the last page.
    """

    items: tuple[ReleaseSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GetRollout:
    """The rollout to return, and how long to wait for it.

    Attributes:
        name: The name of the rollout.
        wait: The maximum time to wait, in seconds. After that, the rollout is returned in its current state.
        until: `ended` waits until the rollout has ended. `stopped` also stops waiting when the rollout has
            paused and needs a person's decision.
    """

    name: str
    wait: WaitSeconds = 0.0
    until: Literal["ended", "stopped"] = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutList:
    """A page of rollouts, newest first.

    Attributes:
        items: The rollouts.
        next: The value of `after` for the next page, or null on the last page.
    """

    items: tuple[RolloutSummary, ...]
    next: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRollout:
    """An order to a rollout.

    Attributes:
        name: The name of the rollout.
        order: The order. `abort` rolls all updated devices back, even after the rollout has ended.
        note: A note for the audit log.
        allow_plain: Whether an `abort` of an ended rollout may roll devices back from an encrypted version to
            a plain one.
    """

    name: str
    order: Order
    note: str = ""
    allow_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """The result of a replay, which computes the decisions of a rollout again from its log.

    Attributes:
        differences: The decisions that differ from those in the log. There should be none.
    """

    differences: tuple[Difference, ...]


def _make_page(kind: type[Page], read: Callable[..., Sequence[Any]], store: Store, request: ListPage) -> Page:
    summaries = read(store, after=request.after, limit=request.limit + 1)
    items = summaries[: request.limit]
    return kind(items=tuple(items), next=items[-1].name if len(summaries) > request.limit else None)


@endpoint(
    "PUT",
    "/packages/{sha256}",
    scope="release",
    summary="Upload a package, so that a release can name it within a day.",
    status=201,
)
def upload_package(fleet: Fleet, _principal: Principal, request: UploadPackage) -> UploadedPackage:
    with read_package(request.file, TrustStore.from_folder(find_keys_folder())) as package:
        manifest = package.manifest
    fleet.folder.uploads.mkdir(mode=0o700, exist_ok=True)
    remove_old_uploads(fleet.folder.uploads)
    size_bytes = request.file.stat().st_size
    request.file.replace(fleet.folder.uploads / request.sha256)
    return UploadedPackage(
        sha256=request.sha256,
        size_bytes=size_bytes,
        model=manifest.name,
        version=manifest.version,
        target=manifest.target,
    )


@endpoint("GET", "/releases", scope="read", summary="List the releases, the newest first.")
def list_releases(fleet: Fleet, _principal: Principal, request: ListPage) -> ReleaseList:
    return _make_page(ReleaseList, releases.list_releases, fleet.store, request)


@endpoint(
    "POST",
    "/releases",
    scope="release",
    summary="Make a release of uploaded packages; that alone updates no device.",
    status=201,
)
def make_release(fleet: Fleet, principal: Principal, request: MakeRelease) -> ReleaseSummary:
    there = (
        {path.name: path for path in fleet.folder.uploads.iterdir()} if fleet.folder.uploads.is_dir() else {}
    )
    missing = [digest for digest in request.packages if digest not in there]
    if missing:
        raise FleetError(f"package {missing[0][:80]!r} is not there; upload it: PUT /packages/SHA256")
    summary = releases.make_release(
        fleet.folder,
        fleet.store,
        TrustStore.from_folder(find_keys_folder()),
        [there[digest] for digest in request.packages],
        actor=principal.name,
        name=request.name,
        note=request.note,
        min_agreement=request.min_agreement,
        encrypt=request.encrypt,
        allow_plain=request.allow_plain,
    )
    for digest in request.packages:
        there[digest].unlink(missing_ok=True)
    return summary


@endpoint("GET", "/releases/{name}", scope="read", summary="Return a release.")
def get_release(fleet: Fleet, _principal: Principal, request: Named) -> ReleaseSummary:
    return releases.find_release(fleet.store, request.name)


@endpoint(
    "POST",
    "/releases/{name}/withdraw",
    scope="release",
    summary="Withdraw a release, so that no rollout can offer it.",
)
def withdraw_release(fleet: Fleet, principal: Principal, request: Named) -> ReleaseSummary:
    return releases.withdraw_release(fleet.folder, fleet.store, request.name, principal.name)


@endpoint("POST", "/rollouts/plan", scope="read", summary="Show what a rollout would do; changes nothing.")
def plan_rollout(fleet: Fleet, _principal: Principal, request: PlanRollout) -> RolloutPlan:
    return rollouts.plan_rollout(fleet.store, StartRollout(**to_plain(request)))


@endpoint("GET", "/rollouts", scope="read", summary="List the rollouts, the newest first.")
def list_rollouts(fleet: Fleet, _principal: Principal, request: ListPage) -> RolloutList:
    return _make_page(RolloutList, rollouts.list_rollouts, fleet.store, request)


@endpoint(
    "POST", "/rollouts", scope="rollout", summary="Start a rollout; its devices are chosen now.", status=201
)
def start_rollout(fleet: Fleet, principal: Principal, request: StartRollout) -> RolloutSummary:
    name = rollouts.start_rollout(fleet.store, request, principal.name)
    return rollouts.find_rollout(fleet.store, name)


def _has_stopped(request: GetRollout, answer: RolloutSummary) -> bool:
    return answer.state not in OPEN_STATES or (request.until == "stopped" and answer.state == "paused")


@endpoint(
    "GET",
    "/rollouts/{name}",
    scope="read",
    summary="Return a rollout, at once or when it has stopped.",
    is_done=_has_stopped,
)
def get_rollout(fleet: Fleet, _principal: Principal, request: GetRollout) -> RolloutSummary:
    return rollouts.find_rollout(fleet.store, request.name)


@endpoint(
    "POST",
    "/rollouts/{name}/orders",
    scope="rollout",
    summary="Let a rollout go on, pause it, or take its devices back.",
)
def order_rollout(fleet: Fleet, principal: Principal, request: OrderRollout) -> RolloutSummary:
    return rollouts.give_order(
        fleet.store,
        request.name,
        request.order,
        principal.name,
        note=request.note,
        allow_plain=request.allow_plain,
    )


@endpoint("GET", "/rollouts/{name}/replay", scope="read", summary="Decide a rollout again from its log.")
def replay_rollout(fleet: Fleet, _principal: Principal, request: Named) -> Replay:
    return Replay(differences=tuple(rollouts.replay_rollout(fleet.store, request.name)))
