"""An endpoint of the HTTP interface, and the fleet that it works on."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final, Generic, Literal, TypeAlias, TypeVar, get_type_hints

from edgekit_fleet.access.principal import Principal, Scope
from edgekit_fleet.identity.authority import Authority, open_authority
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_runtime.dataclass_json import Range

Request = TypeVar("Request")
Answer = TypeVar("Answer")

PageLimit: TypeAlias = Annotated[int, Range(1, 1000)]
WaitSeconds: TypeAlias = Annotated[float, Range(0, 60)]
DEFAULT_LIMIT: Final = 100


@dataclass(frozen=True)
class Fleet:
    """A fleet on this machine."""

    folder: FleetFolder
    store: Store

    @functools.cached_property
    def settings(self) -> FleetSettings:
        return self.folder.read_settings()

    @functools.cached_property
    def authority(self) -> Authority:
        return open_authority(self.folder, self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Generic[Request, Answer]):
    """A method on a path, and the function behind it.

    The path states some fields of the request. The others come from the query (GET, DELETE) or from the body
    (POST). With PUT the body is a file, which `run` gets as the field `file`.

    Attributes:
        name: name of the operation.
        path: `{name}` in it is a field of the request.
        scope: scope that the caller needs.
        request, answer: dataclasses of the request and of the answer.
        run: the function; it may change the fleet.
        status: HTTP status after success.
        is_secret: whether the answer holds a secret; if so, the answer is not kept for a repeated request.
        is_done: for a request with `wait`: whether its answer is final, so that the wait ends.
    """

    name: str
    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    scope: Scope
    summary: str
    request: type[Request]
    answer: type[Answer]
    run: Callable[[Fleet, Principal, Request], Answer]
    status: int = 200
    is_secret: bool = False
    is_done: Callable[[Request, Answer], bool] | None = None


AnyEndpoint: TypeAlias = Endpoint[Any, Any]


def endpoint(
    method: Literal["GET", "POST", "PUT", "DELETE"],
    path: str,
    *,
    scope: Scope,
    summary: str,
    status: int = 200,
    is_secret: bool = False,
    is_done: Callable[[Any, Any], bool] | None = None,
) -> Callable[[Callable[[Fleet, Principal, Request], Answer]], Endpoint[Request, Answer]]:
    """Return a decorator that makes an `Endpoint` of a function `(fleet, principal, request) -> answer`.

    The hints of the function state request and answer; the arguments are attributes of `Endpoint`.
    """

    def make(run: Callable[[Fleet, Principal, Request], Answer]) -> Endpoint[Request, Answer]:
        hints = get_type_hints(run)
        first, *others = run.__name__.split("_")
        return Endpoint(
            name=first + "".join(word.capitalize() for word in others),
            method=method,
            path=path,
            scope=scope,
            summary=summary,
            request=hints[[*hints][2]],
            answer=hints["return"],
            run=run,
            status=status,
            is_secret=is_secret,
            is_done=is_done,
        )

    return make


@dataclass(frozen=True, slots=True, kw_only=True)
class Nothing:
    """A request or an answer without content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A request about one thing.

    Attributes:
        name: its name.
    """

    name: str
