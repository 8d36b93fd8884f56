"""The table of all endpoints."""

from typing import Final

from edgekit_fleet.api.endpoints import access, devices, releases
from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint, Endpoint

PREFIX: Final = "/api/v1"

ENDPOINTS: Final[tuple[AnyEndpoint, ...]] = tuple(
    value
    for module in (devices, releases, access)
    for value in vars(module).values()
    if isinstance(value, Endpoint)
)
