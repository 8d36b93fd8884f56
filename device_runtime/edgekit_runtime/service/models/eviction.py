"""Chooses which models to unload so that another model fits under the memory cap.

The least recently used models are unloaded first. No model is unloaded without need.
"""

from collections.abc import Sequence

from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Resident:
    """A model in memory.

    Attributes:
        name: The name of the model, with its version.
        size_bytes: The memory that the model occupies.
        used_s: The time of the last use, on a monotonic clock.
        is_pinned: Whether the model must not be unloaded.
        is_busy: Whether calls of the model are waiting or running.
    """

    name: str
    size_bytes: int
    used_s: float
    is_pinned: bool = False
    is_busy: bool = False


class MemoryCapError(UnavailableError):
    """A model does not fit under the memory cap. If `retry_after_s` is None, it can never fit."""


def choose_evictions(
    loaded: Sequence[Resident], needed_bytes: int, cap_bytes: int, *, retry_after_s: float = 1.0
) -> tuple[Resident, ...]:
    """Return the models to unload before a model of `needed_bytes` is loaded, in the order of unloading.

    Args:
        loaded: All models in memory.
        needed_bytes: The memory of the model to load, at least 0.
        cap_bytes: The memory cap of all models together.
        retry_after_s: The seconds after which a client should retry if only busy models prevent the load.

    Raises:
        MemoryCapError: The model is larger than the cap, or pinned or busy models prevent the load. Its
            `retry_after_s` is set only if busy models alone prevent it.
    """
    excess_bytes = sum(model.size_bytes for model in loaded) + needed_bytes - cap_bytes
    if excess_bytes <= 0:
        return ()
    chosen: list[Resident] = []
    for model in sorted(loaded, key=lambda model: (model.used_s, model.name)):
        if model.is_pinned or model.is_busy or not model.size_bytes:
            continue
        chosen.append(model)
        excess_bytes -= model.size_bytes
        if excess_bytes <= 0:
            return _without_needless(chosen, -excess_bytes)
    busy_bytes = sum(model.size_bytes for model in loaded if model.is_busy and not model.is_pinned)
    pinned = [model.name for model in loaded if model.is_pinned]
    can_fit_later = excess_bytes <= busy_bytes
    raise MemoryCapError(
        f"a model of {needed_bytes} bytes does not fit under the cap of {cap_bytes} bytes: {excess_bytes} are"
        f" missing even if every model that may be unloaded is; {_advise(can_fit_later, pinned)}",
        retry_after_s if can_fit_later else None,
    )


def _without_needless(chosen: list[Resident], spare_bytes: int) -> tuple[Resident, ...]:
    """Return the chosen models without those that a larger model, chosen later, made unnecessary."""
    remaining = list(chosen)
    for model in reversed(chosen[:-1]):
        if model.size_bytes <= spare_bytes:
            remaining.remove(model)
            spare_bytes -= model.size_bytes
    return tuple(remaining)


def _advise(can_fit_later: bool, pinned: list[str]) -> str:
    if can_fit_later:
        return "the others are busy, try again"
    return f"raise the cap, or unpin one of {pinned}" if pinned else "raise the cap"
