"""The methods of `inference.GRPCInferenceService`: which endpoint of HTTP each one is.

All but inference go through the router of HTTP: its JSON has the fields of the messages, so a request is
written as JSON, and its response is read from there.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.rest import (
    REPOSITORY_INDEX,
    model_path,
    region_path,
    repository_path,
    status_of,
)
from edgekit_runtime.service.api.routes import Router
from edgekit_runtime.service.grpc.http2 import Buffer
from edgekit_runtime.service.grpc.inference import InferMethod
from edgekit_runtime.service.grpc.messages import read_message, write_message
from edgekit_runtime.service.grpc.rpcs import MessageResponder, Method
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.options.config import Inference

_SERVICE: Final = "/inference.GRPCInferenceService/"
_REGIONS: Final = "/v2/systemsharedmemory"

_Values = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    """The endpoint of HTTP behind a method.

    Attributes:
        verb: method of HTTP.
        path: makes the path from the values of the request.
        wrap: makes the values of the response from the JSON.
        states_readiness: whether a model that is not there or not ready is no error.
    """

    verb: str
    path: Callable[[_Values], str]
    wrap: Callable[[Any], _Values] = dict
    states_readiness: bool = False


def _version_path(values: _Values) -> str:
    return model_path(values["name"], values["version"] or None)


def _statistics_path(values: _Values) -> str:
    return f"{_version_path(values)}/stats" if values["name"] else "/v2/models/stats"


def _regions_path(action: str) -> Callable[[_Values], str]:
    return lambda values: region_path(values["name"], action) if values["name"] else f"{_REGIONS}/{action}"


_ENDPOINTS: Final[Mapping[str, _Endpoint]] = {
    "ServerLive": _Endpoint(verb="GET", path=lambda _: "/v2/health/live"),
    "ServerReady": _Endpoint(verb="GET", path=lambda _: "/v2/health/ready"),
    "ModelReady": _Endpoint(
        verb="GET", path=lambda values: f"{_version_path(values)}/ready", states_readiness=True
    ),
    "ServerMetadata": _Endpoint(verb="GET", path=lambda _: "/v2"),
    "ModelMetadata": _Endpoint(verb="GET", path=_version_path),
    "ModelStatistics": _Endpoint(verb="GET", path=_statistics_path),
    "RepositoryIndex": _Endpoint(
        verb="POST", path=lambda _: REPOSITORY_INDEX, wrap=lambda models: {"models": models}
    ),
    "RepositoryModelLoad": _Endpoint(
        verb="POST", path=lambda values: repository_path(values["model_name"], "load")
    ),
    "RepositoryModelUnload": _Endpoint(
        verb="POST", path=lambda values: repository_path(values["model_name"], "unload")
    ),
    "SystemSharedMemoryStatus": _Endpoint(
        verb="GET",
        path=_regions_path("status"),
        wrap=lambda regions: {"regions": {region["name"]: region for region in regions}},
    ),
    "SystemSharedMemoryRegister": _Endpoint(
        verb="POST", path=lambda values: region_path(values["name"], "register")
    ),
    "SystemSharedMemoryUnregister": _Endpoint(verb="POST", path=_regions_path("unregister")),
}


class _RestHead:
    """The head of the request over HTTP that a message stands for; the router reads no more of one."""

    __slots__ = ("content_coding", "method", "path", "route")

    def __init__(self, method: str, path: str) -> None:
        self.method, self.path = method, path
        self.content_coding = ""
        self.route: Any = None


class _RestMethod(Method):
    """A method that the router of HTTP answers."""

    is_stream = False

    def __init__(self, name: str, endpoint: _Endpoint, router: Router) -> None:
        self._name, self._endpoint, self._router = name, endpoint, router

    def handle(self, responder: MessageResponder, message: memoryview) -> None:
        endpoint, values = self._endpoint, read_message(f"{self._name}Request", message)
        if "parameters" in values:
            choices = values["parameters"].items()
            values["parameters"] = {name: next(iter(choice.values()), None) for name, choice in choices}
        # Content of files is refused by its name; JSON has no bytes.
        body = json.dumps(values, default=lambda _: "").encode() if endpoint.verb == "POST" else b""
        head: Any = _RestHead(endpoint.verb, endpoint.path(values))
        self._router.handle_request(responder, head, memoryview(body))  # type: ignore[arg-type]  # has what it uses

    def encode_response(self, _head: bytes, *body: Buffer) -> tuple[Buffer, ...]:
        document = self._endpoint.wrap(json.loads(bytes(body[0])))
        return (write_message(f"{self._name}Response", document),)

    def encode_error(self, error: EdgekitError) -> bytes | None:
        is_known = self._endpoint.states_readiness and status_of(error) in (404, 503)
        return write_message(f"{self._name}Response", {"ready": False}) if is_known else None


def make_methods(router: Router, registry: Registry, limits: Inference) -> dict[str, Method]:
    """Return the methods by their paths."""
    methods: dict[str, Method] = {
        name: _RestMethod(name, endpoint, router) for name, endpoint in _ENDPOINTS.items()
    }
    methods["ModelInfer"] = InferMethod(router.inference, registry, limits, is_stream=False)
    methods["ModelStreamInfer"] = InferMethod(router.inference, registry, limits, is_stream=True)
    return {_SERVICE + name: method for name, method in methods.items()}


def refuse_method(path: str, methods: Mapping[str, Method]) -> RequestError:
    """Return the error for a method that is not here."""
    names = ", ".join(name.removeprefix(_SERVICE) for name in methods)
    return RequestError(501, f"{path[:200]} is not implemented; {_SERVICE[1:-1]} has {names}")
