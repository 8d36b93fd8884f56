"""The work of a search in seconds of a nominal processor, so that the limit is the same on every machine.

With a time limit, a search on a slower or busy machine would end earlier and might choose another form.
"""

from collections.abc import Callable, Mapping

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.costs.target_model import model_cost
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.targets.loader import load_target

_NOMINAL = "x86-64"
# The time to open a model, per operator and per value of its constants, and the time of an inference whose
# work cannot be counted.
_OPEN_OPERATOR_S = 5e-4
_OPEN_PARAMETER_S = 1e-8
_RUN_OPERATOR_S = 2e-5
_RUN_PARAMETER_S = 1e-9


class SearchWork:
    """Counts the work of opening and running models in a search, in predicted seconds on `x86-64`.

    Attributes:
        inference_s: The work of one inference.
        limit_s: The limit of the search.
        spent_s: The work so far.
    """

    def __init__(self, model: Model, dims: Mapping[str, int], limit_s: float) -> None:
        size = model.size
        self._open_s = _OPEN_OPERATOR_S * size.nodes + _OPEN_PARAMETER_S * size.parameters
        try:
            self.inference_s = model_cost(model.node_costs(dims), load_target(_NOMINAL)).latency_s
        except ModelError:
            self.inference_s = _RUN_OPERATOR_S * size.nodes + _RUN_PARAMETER_S * size.parameters
        self.limit_s = limit_s
        self.spent_s = 0.0

    def count(self, *, inferences: float = 0, models: float = 0, seconds: float = 0) -> None:
        self.spent_s += inferences * self.inference_s + models * self._open_s + seconds

    def allows(self, seconds: float) -> bool:
        """Return whether `seconds` of additional work are within the limit."""
        return self.spent_s + seconds <= self.limit_s

    def take(self, seconds: float) -> bool:
        """Add `seconds` of work and return True, or return False if the limit does not allow it."""
        is_allowed = self.allows(seconds)
        self.count(seconds=seconds * is_allowed)
        return is_allowed

    def part(self, share: float, limit_s: float) -> float:
        """Return the value of `spent_s` at which a part of the search must end.

        The part may use a `share` (0..1) of the work that remains until `limit_s`.
        """
        return self.spent_s + share * (limit_s - self.spent_s)

    def reaches(self, limit_s: float) -> Callable[[], bool]:
        """Return a function that returns whether the work so far has reached `limit_s`."""
        return lambda: self.spent_s >= limit_s
