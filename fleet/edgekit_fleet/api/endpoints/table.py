"""The table of all endpoints, collected from the modules in this folder."""

from typing import Final

from edgekit_fleet.api import endpoints
from edgekit_fleet.api.endpoints.endpoint import AnyEndpoint, Endpoint
from edgekit_runtime.system.folder_modules import import_modules

PREFIX: Final = "/api/v1"

ENDPOINTS: Final[tuple[AnyEndpoint, ...]] = tuple(
    value
    for module in import_modules(endpoints)
    for value in vars(module).values()
    if isinstance(value, Endpoint)
)
