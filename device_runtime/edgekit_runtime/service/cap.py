"""Room for a model under the memory cap: which models must go, by what is known of the served ones."""

from collections.abc import Mapping, Sequence

from edgekit_runtime.service.eviction import Loaded, choose_evictions
from edgekit_runtime.service.loading import Loaded as Opened
from edgekit_runtime.service.memory import package_bytes
from edgekit_runtime.service.metrics import LaneMetrics


def choose_victims(
    served: Mapping[str, Sequence[tuple[Opened, LaneMetrics]]], needed_bytes: int, cap_bytes: int
) -> list[str]:
    """Return the names of the models to unload before one of `needed_bytes` is loaded.

    Args:
        served: name -> its versions, without the model that is to be loaded.
        needed_bytes: of that model.
        cap_bytes: of all models.

    Raises:
        MemoryCapError: it does not fit even alone.
    """
    loaded = [
        Loaded(
            name,
            package_bytes([opened.path for opened, _ in versions]),
            max((metrics.last_s or 0.0) for _, metrics in versions),
        )
        for name, versions in served.items()
        if versions
    ]
    return [victim.name for victim in choose_evictions(loaded, needed_bytes, cap_bytes)]
