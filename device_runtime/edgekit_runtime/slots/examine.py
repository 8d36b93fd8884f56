"""The condition of a model's packages, as text to show."""

from dataclasses import dataclass
from pathlib import Path

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.slots.folder import FoundState, ModelFolder
from edgekit_runtime.slots.state import Installed


@dataclass(frozen=True, slots=True)
class Place:
    """One package.

    Attributes:
        name: `active`, `spare` or `factory`.
        installed: what the state says of it.
        path: where it lies.
        problem: why it cannot be opened, or None.
    """

    name: str
    installed: Installed
    path: Path
    problem: str | None


def examine(folder: ModelFolder, loaded: FoundState) -> tuple[Place, ...]:
    """Return the packages that a state names, each verified."""
    state = loaded.state
    named = (("active", state.active), ("spare", state.spare), ("factory", state.factory))
    places = []
    for name, item in named:
        if item is None:
            continue
        problem = None
        try:
            folder.open(state, item).close()
        except EdgekitError as cause:
            problem = str(cause)
        places.append(Place(name, item, folder.locate(state, item), problem))
    return tuple(places)
