"""The methods of `inference.GRPCInferenceService`, and the HTTP endpoint for each of them.

All methods except inference use the HTTP router. Its JSON has the same fields as the messages, so requests
and responses are converted to and from JSON.
"""

import json
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from edgekit_runtime.errors import EdgekitError, RequestError
from edgekit_runtime.protocol.rest import model_path, quote_segment, status_of
from edgekit_runtime.service.api.routes import Router
from edgekit_runtime.service.grpc.http2 import Buffer
from edgekit_runtime.service.grpc.inference import InferMethod, read_parameters
from edgekit_runtime.service.grpc.messages import read_message, write_message
from edgekit_runtime.service.grpc.rpcs import MessageResponder, Method, RpcHead
from edgekit_runtime.service.http.server import HttpServer
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.options.config import ServiceConfig

_SERVICE: Final = "/inference.GRPCInferenceService/"


class _Endpoint(NamedTuple):
    """The endpoint of HTTP behind a method.

    Attributes:
        path: see `_find_path`.
        wrap: makes the values of the response from the JSON.
    """

    verb: str
    path: str
    wrap: Callable[[Any], Mapping[str, Any]] = dict


_ENDPOINTS: Final[Mapping[str, _Endpoint]] = {
    "ServerLive": _Endpoint("GET", "/v2/health/live"),
    "ServerReady": _Endpoint("GET", "/v2/health/ready"),
    "ModelReady": _Endpoint("GET", "{model}/ready"),
    "ServerMetadata": _Endpoint("GET", "/v2"),
    "ModelMetadata": _Endpoint("GET", "{model}"),
    "ModelStatistics": _Endpoint("GET", "{model}/stats"),
    "RepositoryIndex": _Endpoint("POST", "/v2/repository/index", lambda models: {"models": models}),
    "RepositoryModelLoad": _Endpoint("POST", "/v2/repository/models/{model_name}/load"),
    "RepositoryModelUnload": _Endpoint("POST", "/v2/repository/models/{model_name}/unload"),
    "SystemSharedMemoryStatus": _Endpoint(
        "GET",
        "/v2/systemsharedmemory{region}/status",
        lambda regions: {"regions": {region["name"]: region for region in regions}},
    ),
    "SystemSharedMemoryRegister": _Endpoint("POST", "/v2/systemsharedmemory/region/{name}/register"),
    "SystemSharedMemoryUnregister": _Endpoint("POST", "/v2/systemsharedmemory{region}/unregister"),
}


def _find_path(template: str, values: Mapping[str, Any]) -> str:
    """Return the path for the strings of a request; without a name, the path of all models or regions."""
    names = {key: quote_segment(text) for key, text in values.items() if isinstance(text, str)}
    name, version = values.get("name", ""), values.get("version", "")
    names["model"] = model_path(name, version or None) if name else "/v2/models"
    names["region"] = f"/region/{names['name']}" if name else ""
    return template.format(**names)


class _RestMethod(Method):
    def __init__(self, name: str, endpoint: _Endpoint, router: Router) -> None:
        self._name, self._endpoint, self._router = name, endpoint, router

    def handle(self, responder: MessageResponder, _head: RpcHead, message: memoryview) -> None:
        endpoint, values = self._endpoint, read_message(f"{self._name}Request", message)
        if "parameters" in values:
            values["parameters"] = read_parameters(values)
        # Content of files is refused by its name; JSON has no bytes.
        body = json.dumps(values, default=lambda _: "").encode() if endpoint.verb == "POST" else b""
        path = _find_path(endpoint.path, values)
        # The router reads no more of the head of a request, and takes what answers for its connection.
        head: Any = SimpleNamespace(method=endpoint.verb, path=path, content_coding="", route=None)
        client: Any = responder
        self._router.handle_request(client, head, memoryview(body))

    def encode_response(self, _head: bytes, *body: Buffer) -> tuple[Buffer, ...]:
        document = self._endpoint.wrap(json.loads(bytes(body[0])))
        return (write_message(f"{self._name}Response", document),)

    def encode_error(self, error: EdgekitError) -> bytes | None:
        is_not_ready = self._name == "ModelReady" and status_of(error) in (404, 503)
        return write_message("ModelReadyResponse", {"ready": False}) if is_not_ready else None


class GrpcService:
    """The RPC methods, and the state that all connections share.

    Attributes:
        server: The HTTP server, which counts the connections and enforces their limits.
        bodies: Decompresses messages.
        token: The expected token, as in `check_access`.
        max_streams: The maximum number of concurrent RPCs on one connection.
    """

    def __init__(
        self,
        server: HttpServer,
        router: Router,
        registry: Registry,
        config: ServiceConfig,
        *,
        token: bytes | None,
    ) -> None:
        self.server, self.bodies, self.token = server, router.bodies, token
        self.max_streams = config.grpc.max_streams
        methods: dict[str, Method] = {
            name: _RestMethod(name, endpoint, router) for name, endpoint in _ENDPOINTS.items()
        }
        for name, is_stream in (("ModelInfer", False), ("ModelStreamInfer", True)):
            methods[name] = InferMethod(router.inference, registry, config.inference, is_stream=is_stream)
        self._methods = {_SERVICE + name: method for name, method in methods.items()}

    def find_method(self, path: str) -> Method:
        """Return the method at a path.

        Raises:
            RequestError: There is no such method.
        """
        method = self._methods.get(path)
        if method is None:
            names = ", ".join(name.removeprefix(_SERVICE) for name in self._methods)
            raise RequestError(501, f"{path[:200]} is not implemented; {_SERVICE[1:-1]} has {names}")
        return method
