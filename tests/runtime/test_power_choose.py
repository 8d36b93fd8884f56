from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgekit_runtime.power.governor.choose import GovernorModel, State, choose
from edgekit_runtime.power.governor.settings import (
    BatteryLimit,
    Cost,
    Decision,
    DeviceLimits,
    Load,
    ModelSetting,
    Profile,
)

NOW_S = 1000.0
IDLE_W = 2.0
SETTINGS = [
    ModelSetting(variant, batch, threads) for variant in "abc" for batch in (1, 4) for threads in (1, 2)
]
costs = st.builds(
    Cost,
    latency_s=st.floats(1e-3, 0.2),
    energy_j=st.floats(1e-3, 0.5),
    accuracy=st.sampled_from([0.5, 0.7, 0.8, 0.9]),
)
profiles = st.builds(Profile, costs=st.dictionaries(st.sampled_from(SETTINGS), costs, min_size=1))
loads = st.builds(Load, rate_hz=st.floats(0.0, 60.0), burstiness=st.floats(0.0, 2.0))
watts = st.floats(0.5, 40.0)
deadlines = st.floats(5e-3, 1.0)


def fresh(profile: Profile, load: Load, deadline_s: float | None = None) -> State:
    return State(
        idle_w=IDLE_W, models={"m": GovernorModel(replace(profile, deadline_s=deadline_s), load=load)}
    )


def decide(state: State, power_w: float | None, window_s: float = 0.0) -> Decision:
    return choose(state, DeviceLimits(power_w=power_w, window_s=window_s), NOW_S)["m"]


def watts_of(state: State, setting: ModelSetting) -> float:
    return state.idle_w + state.models["m"].forecasts()[setting].power_w


def fitting(state: State, power_w: float) -> list[ModelSetting]:
    """Settings that are well within the deadline and under the limit."""
    deadline_s = state.models["m"].profile.deadline_s
    assert deadline_s is not None
    return [
        setting
        for setting, forecast in state.models["m"].forecasts().items()
        if watts_of(state, setting) <= power_w and forecast.latency_s <= 0.9 * deadline_s
    ]


@given(profiles, loads, watts, deadlines)
def test_setting_that_meets_all_limits_is_found_and_is_the_most_accurate(
    profile: Profile, load: Load, power_w: float, deadline_s: float
) -> None:
    state = fresh(profile, load, deadline_s)
    able = fitting(state, power_w)
    decision = decide(state, power_w)
    assert decision.holds == bool(able)
    if able:
        assert decision.setting in able
        assert decision.admit == 1.0
        assert profile.costs[decision.setting].accuracy == max(profile.costs[one].accuracy for one in able)


quick = st.builds(
    Profile,
    costs=st.dictionaries(
        st.sampled_from([setting for setting in SETTINGS if setting.batch == 1]),
        st.builds(
            Cost,
            latency_s=st.floats(1e-3, 0.04),
            energy_j=st.floats(1e-3, 0.5),
            accuracy=st.floats(0.5, 0.9),
        ),
        min_size=1,
    ),
)
calm = st.builds(Load, rate_hz=st.floats(0.0, 20.0), burstiness=st.floats(0.0, 2.0))
places = st.integers(0, 100)


@given(quick, calm, places, places, st.floats(0.0, 5.0), st.floats(0.0, 60.0), st.floats(-500, -1))
def test_nothing_over_the_limit_begins_while_it_is_overdrawn(
    profile: Profile, load: Load, place: int, current: int, age_s: float, window_s: float, share: float
) -> None:
    state = fresh(profile, load)
    settings = sorted(profile.costs)
    power_w = watts_of(state, settings[place % len(settings)]) * 1.001
    before = settings[current % len(settings)]
    models = {"m": replace(state.models["m"], decision=Decision(before))}
    state = replace(state, models=models, since_s=NOW_S - age_s, credit_j=share * power_w)
    setting = decide(state, power_w, window_s).setting
    assert setting == before or watts_of(state, setting) <= power_w


@given(quick, calm, places, st.floats(0.0, 1000.0))
def test_window_of_nothing_never_takes_a_setting_over_the_limit_whatever_the_credit(
    profile: Profile, load: Load, place: int, credit_j: float
) -> None:
    state = replace(fresh(profile, load), credit_j=credit_j)
    settings = sorted(profile.costs)
    power_w = watts_of(state, settings[place % len(settings)]) * 1.001
    assert watts_of(state, decide(state, power_w).setting) <= power_w


@given(profiles, loads, watts, watts, deadlines)
def test_more_watts_never_cost_accuracy(
    profile: Profile, load: Load, one_w: float, other_w: float, deadline_s: float
) -> None:
    state = fresh(profile, load, deadline_s)
    less, more = (decide(state, power_w) for power_w in sorted((one_w, other_w)))
    assume(less.holds)
    assert profile.costs[more.setting].accuracy >= profile.costs[less.setting].accuracy
    assert more.holds


@given(profiles, loads, watts, watts, deadlines)
def test_more_watts_never_shed_more(
    profile: Profile, load: Load, one_w: float, other_w: float, deadline_s: float
) -> None:
    state = fresh(profile, load, deadline_s)
    assume(any(one.latency_s <= 0.9 * deadline_s for one in state.models["m"].forecasts().values()))
    less, more = (decide(state, power_w) for power_w in sorted((one_w, other_w)))
    assert more.admit >= less.admit


@given(profiles, loads, watts, deadlines, deadlines)
def test_more_time_never_costs_accuracy(
    profile: Profile, load: Load, power_w: float, one_s: float, other_s: float
) -> None:
    sooner, later = (
        decide(fresh(profile, load, deadline_s), power_w) for deadline_s in sorted((one_s, other_s))
    )
    assume(sooner.holds)
    assert profile.costs[later.setting].accuracy >= profile.costs[sooner.setting].accuracy


PAIR = Profile(
    {ModelSetting("good"): Cost(0.01, 0.10, 0.9), ModelSetting("small"): Cost(0.005, 0.05, 0.8)}
)  # at 20 requests a second: 4.0 W and 3.0 W
BUSY = Load(rate_hz=20.0, burstiness=0.0)


def test_turn_is_taken_where_it_leaves_what_was_drawn_nearer_to_the_limit() -> None:
    state = fresh(PAIR, BUSY)
    chosen = [
        decide(replace(state, credit_j=credit_j), 3.4, 30.0).setting.variant
        for credit_j in (-1.0, 0.1, 0.3, 1.0)
    ]  # two seconds cost 1.2 J or leave 0.8 J: alike at a credit of 0.2 J
    assert chosen == ["small", "small", "good", "good"]


def test_better_setting_far_over_the_limit_gets_no_turn() -> None:
    limits_w = 3.1  # a second at 0.9 W over it is 6 % of a window of 5 s
    state = replace(fresh(PAIR, BUSY), credit_j=1e9)
    assert decide(state, limits_w, 5.0).setting == ModelSetting("small")
    assert decide(state, limits_w, 30.0).setting == ModelSetting("good")


def test_no_setting_under_the_limit_sheds_to_it_and_says_so() -> None:
    decision = decide(fresh(PAIR, BUSY), 2.5, 30.0)
    assert decision.setting == ModelSetting("small")
    assert decision.admit == pytest.approx(0.5)
    assert (decision.holds, decision.reason) == (False, "no setting holds the limit")


def test_limit_under_the_idle_power_leaves_the_least_share() -> None:
    assert decide(fresh(PAIR, BUSY), 1.0).admit == pytest.approx(0.05)


def test_more_requests_than_any_setting_can_take_are_shed() -> None:
    decision = decide(fresh(PAIR, Load(rate_hz=1000.0), 0.05), None)
    assert decision.setting == ModelSetting("small")
    assert decision.admit == pytest.approx(0.85 / (1000 * 0.005))
    assert not decision.holds


def test_deadline_that_nothing_meets_takes_the_soonest_answer() -> None:
    decision = decide(fresh(PAIR, BUSY, 0.001), None)
    assert decision == Decision(
        ModelSetting("small"), 1.0, holds=False, reason="no setting meets the deadline"
    )


def test_batch_is_not_waited_for_beyond_the_deadline() -> None:
    profile = Profile(
        {
            ModelSetting("good", batch=1): Cost(0.01, 0.1, 0.9),
            ModelSetting("good", batch=8): Cost(0.02, 0.03, 0.9),
        }
    )
    for rate_hz, batch in ((20.0, 1), (90.0, 8)):
        state = fresh(profile, Load(rate_hz=rate_hz, burstiness=0.0), 0.2)
        assert decide(state, None).setting.batch == batch


@pytest.mark.parametrize(
    "make",
    [
        lambda: DeviceLimits(power_w=0.0),
        lambda: DeviceLimits(window_s=-1.0),
        lambda: BatteryLimit(1.0, 0.0),
    ],
)
def test_impossible_values_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="expected"):
        make()
