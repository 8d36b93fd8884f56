"""An endpoint of the HTTP interface, and the fleet that it acts on."""

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
    """An HTTP method and path with the function that handles the requests.

    Some fields of a request are in the path. The others are in the query (GET, DELETE) or in the body (POST).
    With PUT, the body is a file, whose path is the field `file`.

    Attributes:
        name: The name of the operation.
        path: The path. Each `{name}` in it is a field of the request.
        scope: The scope that the caller needs.
        request, answer: The dataclasses of the request and of the answer.
        run: The function that handles a request. It may change the fleet.
        status: The HTTP status of a success.
        is_secret: Whether the answer contains a secret. Such an answer is not stored for repeated requests.
        is_done: Returns whether an answer is final. A request with `wait` waits for a final answer.
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
    """Return a decorator that turns a function into an `Endpoint`.

    The function has the parameters `fleet`, `principal` and `request`, and returns the answer. Its type hints
    determine the request and answer classes.

    Args:
        method: The HTTP method.
        path: The path. Each `{name}` in it is a field of the request.
        scope: The scope that the caller needs.
        summary: A short description for the OpenAPI document.
        status: The HTTP status of a success.
        is_secret: Whether the answer contains a secret. Such an answer is not stored for repeated requests.
        is_done: Returns whether an answer is final. A request with `wait` waits for a final answer. None if
            requests do not wait.
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
    """A request that only has a name.

    Attributes:
        name: The name of the object.
    """

    name: str
