"""Finds the plan with the lowest loss of accuracy for each level of power.

A plan has a setting for each governed model, and minimises the sum of the squared losses. A model that loses
10 % of its accuracy therefore counts as much as a hundred models that lose 1 %, so no model is sacrificed for
another.

The search is exact. It adds the models one by one to partial plans. Power and loss are sums over the models.
A partial plan is therefore dropped if another partial plan has neither more power nor more loss.

Source: H. Kellerer, U. Pferschy and D. Pisinger, Knapsack Problems, 2004, section 3.4 (dynamic programming
with lists, dominance).
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from edgekit_runtime.power.governor.settings import ModelSetting
from edgekit_runtime.records import dataclass


@dataclass(frozen=True, slots=True)
class Option:
    """One setting of one model.

    Attributes:
        power_w: The power above the idle power, in watts.
        loss: The fraction of the accuracy that the model loses, or more than 1 if it misses its deadline.
    """

    setting: ModelSetting
    power_w: float
    loss: float


@dataclass(frozen=True, slots=True)
class Plan:
    """A setting for each model.

    Attributes:
        power_w: The power of the device with all models, in watts.
        loss: The sum of the squared losses of the models.
        settings: The settings, in the order of the models.
    """

    power_w: float
    loss: float = 0.0
    settings: tuple[ModelSetting, ...] = ()

    def add(self, option: Option) -> "Plan":
        """Return this plan extended by a setting of one more model."""
        return Plan(
            self.power_w + option.power_w, self.loss + option.loss**2, (*self.settings, option.setting)
        )


Choice = TypeVar("Choice", Option, Plan)


def make_frontier(models: Iterable[Sequence[Option]], idle_w: float) -> list[Plan]:
    """Return the Pareto front of power and loss, from the lowest power to the lowest loss.

    Args:
        models: The options of each model, at least one each.
        idle_w: The power of the device without requests, in watts.
    """
    front = [Plan(idle_w)]
    for options in models:
        able = _keep_best(options)
        front = _keep_best([plan.add(option) for plan in front for option in able])
    return front


def choose_turns(
    frontier: Sequence[Plan], allowed_w: float, most_w: float
) -> tuple[Plan | None, Plan | None]:
    """Return two plans that should alternate so that the mean power is `allowed_w` and the loss is lowest.

    Args:
        frontier: The result of `make_frontier`.
        allowed_w: The mean power.
        most_w: The maximum power of either plan.

    Returns:
        A pair. The first plan uses at most `allowed_w`, or is None if every plan needs more power. The second
        plan uses more, up to `most_w`, or is None if no such plan has less loss.
    """
    hull: list[Plan] = []
    for plan in frontier:
        if plan.power_w > most_w:
            break
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], plan):
            hull.pop()
        hull.append(plan)
    lower = next((plan for plan in reversed(hull) if plan.power_w <= allowed_w), None)
    upper = next((plan for plan in hull if plan.power_w > allowed_w), None)
    return lower, upper


def _keep_best(choices: Iterable[Choice]) -> list[Choice]:
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.power_w, choice.loss)):
        if not best or choice.loss < best[-1].loss:
            best.append(choice)
    return best


def _is_above(middle: Plan, previous: Plan, right: Plan) -> bool:
    """Return True if alternating the outer plans loses no more than the middle plan, at equal mean power."""
    return (middle.loss - previous.loss) * (right.power_w - previous.power_w) >= (
        right.loss - previous.loss
    ) * (middle.power_w - previous.power_w)
