"""The plan for several models, against a search through all of them."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekit_runtime.power.governor.choose import GovernorModel, State, choose
from edgekit_runtime.power.governor.plan import Option, Plan, choose_turns, make_frontier
from edgekit_runtime.power.governor.settings import Cost, Decision, DeviceLimits, Load, ModelSetting, Profile

IDLE_W = 2.0
# Few different numbers, so that equal sums come up.
options = st.lists(
    st.builds(
        Option,
        st.builds(ModelSetting, st.sampled_from("abcdef"), st.integers(1, 4), st.integers(1, 4)),
        st.integers(0, 20).map(float),
        st.sampled_from([0.0, 0.125, 0.25, 0.5, 1.5]),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda option: option.setting,
)


def every_plan(models: list[list[Option]]) -> list[Plan]:
    plans = []
    for chosen in product(*models):
        plan = Plan(IDLE_W)
        for option in chosen:
            plan = plan.add(option)
        plans.append(plan)
    return plans


@settings(deadline=None)
@given(st.lists(options, min_size=1, max_size=4))
def test_frontier_holds_the_best_of_all_plans_at_every_power(models: list[list[Option]]) -> None:
    frontier, plans = make_frontier(models, IDLE_W), every_plan(models)
    for allowed_w in sorted({plan.power_w for plan in plans}):
        least = min(plan.loss for plan in plans if plan.power_w <= allowed_w)
        assert min(plan.loss for plan in frontier if plan.power_w <= allowed_w) == least
    assert set(frontier) <= set(plans)
    assert sorted(frontier, key=lambda plan: (plan.power_w, -plan.loss)) == frontier


@settings(deadline=None)
@given(st.lists(options, min_size=1, max_size=3), st.floats(1.0, 70.0), st.floats(0.0, 30.0))
def test_no_other_two_plans_lose_less_by_turns(
    models: list[list[Option]], allowed_w: float, more_w: float
) -> None:
    frontier = make_frontier(models, IDLE_W)
    lower, upper = choose_turns(frontier, allowed_w, allowed_w + more_w)
    able = [plan for plan in every_plan(models) if plan.power_w <= allowed_w + more_w]
    under = [plan for plan in able if plan.power_w <= allowed_w]
    assert (lower is None) == (not under)
    if lower is None:
        return

    def mean_loss(one: Plan, other: Plan | None) -> float:
        if other is None:
            return one.loss
        share = (allowed_w - one.power_w) / (other.power_w - one.power_w)
        return one.loss + share * (other.loss - one.loss)

    best = min(plan.loss for plan in under)
    for one, other in product(under, [plan for plan in able if plan.power_w > allowed_w]):
        best = min(best, mean_loss(one, other))
    assert mean_loss(lower, upper) == pytest.approx(best, abs=1e-9)


def model(good: float, small: float, rate_hz: float = 20.0) -> GovernorModel:
    """A model of 2 W and 0.9 of accuracy or 1 W and less, at 20 requests a second."""
    costs = {ModelSetting("good"): Cost(0.01, 0.1, good), ModelSetting("small"): Cost(0.005, 0.05, small)}
    return GovernorModel(Profile(costs), load=Load(rate_hz=rate_hz, burstiness=0.0))


def plan(models: dict[str, GovernorModel], power_w: float) -> dict[str, Decision]:
    return choose(State(idle_w=IDLE_W, models=models), DeviceLimits(power_w=power_w, window_s=0.0), 0.0)


def test_model_that_would_lose_most_keeps_its_accuracy() -> None:
    models = {"a": model(0.9, 0.85), "b": model(0.9, 0.6)}
    decisions = plan(models, 5.1)  # 6 W for both at their best, 5 W for one of them
    assert {name: one.setting.variant for name, one in decisions.items()} == {"a": "small", "b": "good"}
    assert [bool(one.reason) for one in decisions.values()] == [True, False]


def test_two_models_use_what_a_governor_each_would_leave() -> None:
    models = {"a": model(0.9, 0.8), "b": model(0.9, 0.8)}
    variants = sorted(one.setting.variant for one in plan(models, 5.1).values())
    assert variants == ["good", "small"]


def test_all_models_shed_the_same_share_where_nothing_holds() -> None:
    decisions = plan({"a": model(0.9, 0.8), "b": model(0.9, 0.8)}, 3.0)  # 4 W at least, 2 of them idle
    assert [one.admit for one in decisions.values()] == pytest.approx([0.5, 0.5])
    assert not any(one.holds for one in decisions.values())


def test_model_that_is_late_sheds_alone() -> None:
    decisions = plan({"a": model(0.9, 0.8), "b": model(0.9, 0.8, rate_hz=1000.0)}, 100.0)
    assert decisions["a"] == Decision(ModelSetting("good"))
    assert decisions["b"].admit == pytest.approx(0.85 / (1000 * 0.005))
    assert decisions["b"].reason == "no setting meets the deadline"
