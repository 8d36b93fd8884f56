from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from edgekit_runtime.power.choose import State, choose
from edgekit_runtime.power.forecast import Learned
from edgekit_runtime.power.readings import Readings
from edgekit_runtime.power.settings import BatteryLimit, Cost, Decision, Limits, Load, Profile, Setting

NOW = Readings(at_s=1000.0)
SETTINGS = [Setting(variant, batch, threads) for variant in "abc" for batch in (1, 4) for threads in (1, 2)]
costs = st.builds(
    Cost,
    latency_s=st.floats(1e-3, 0.2),
    energy_j=st.floats(1e-3, 0.5),
    accuracy=st.sampled_from([0.5, 0.7, 0.8, 0.9]),
)
profiles = st.builds(
    Profile,
    costs=st.dictionaries(st.sampled_from(SETTINGS), costs, min_size=1),
    idle_w=st.floats(0.5, 5.0),
)
loads = st.builds(Load, rate_hz=st.floats(0.0, 60.0), burstiness=st.floats(0.0, 2.0))
watts = st.floats(0.5, 40.0)
deadlines = st.floats(5e-3, 1.0)


def fresh(profile: Profile, load: Load) -> State:
    return State(Learned(profile.idle_w), load=load)


def fitting(state: State, limits: Limits, profile: Profile) -> list[Setting]:
    """Settings that are well within the deadline and under the limit."""
    assert limits.power_w is not None and limits.deadline_s is not None
    return [
        setting
        for setting, forecast in state.forecasts(profile).items()
        if forecast.power_w <= limits.power_w and forecast.latency_s <= 0.9 * limits.deadline_s
    ]


@given(profiles, loads, watts, deadlines)
def test_setting_that_meets_all_limits_is_found_and_is_the_most_accurate(
    profile: Profile, load: Load, power_w: float, deadline_s: float
) -> None:
    state, limits = fresh(profile, load), Limits(power_w=power_w, deadline_s=deadline_s)
    able = fitting(state, limits, profile)
    decision = choose(state, NOW, limits, profile)
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
    idle_w=st.floats(0.5, 5.0),
)
calm = st.builds(Load, rate_hz=st.floats(0.0, 20.0), burstiness=st.floats(0.0, 2.0))
places = st.integers(0, 100)


def limits_that_fit(state: State, profile: Profile, place: int, window_s: float) -> Limits:
    """Limits that one setting at least meets."""
    forecasts = list(state.forecasts(profile).values())
    forecast = forecasts[place % len(forecasts)]
    return Limits(power_w=forecast.power_w * 1.001, deadline_s=forecast.latency_s / 0.899, window_s=window_s)


@given(quick, calm, places, places, st.floats(0.0, 5.0), st.floats(-50, 0))
def test_setting_in_force_is_never_kept_over_a_limit_without_credit(
    profile: Profile, load: Load, place: int, current: int, age_s: float, credit_j: float
) -> None:
    state = fresh(profile, load)
    limits = limits_that_fit(state, profile, place, 30.0)
    decision = Decision(sorted(profile.costs)[current % len(profile.costs)])
    state = replace(state, decision=decision, since_s=NOW.at_s - age_s, credit_j=credit_j)
    forecast = state.forecasts(profile)[choose(state, NOW, limits, profile).setting]
    assert limits.power_w is not None and limits.deadline_s is not None
    assert forecast.power_w <= limits.power_w
    assert forecast.latency_s <= limits.deadline_s


@given(quick, calm, places, st.floats(0.0, 1000.0))
def test_window_of_nothing_never_takes_a_setting_over_the_limit_whatever_the_credit(
    profile: Profile, load: Load, place: int, credit_j: float
) -> None:
    state = replace(fresh(profile, load), credit_j=credit_j)
    limits = limits_that_fit(state, profile, place, 0.0)
    decision = choose(state, NOW, limits, profile)
    assert limits.power_w is not None
    assert state.forecasts(profile)[decision.setting].power_w <= limits.power_w


@given(profiles, loads, watts, watts, deadlines)
def test_more_watts_never_cost_accuracy(
    profile: Profile, load: Load, one_w: float, other_w: float, deadline_s: float
) -> None:
    state = fresh(profile, load)
    less, more = (
        choose(state, NOW, Limits(power_w=power_w, deadline_s=deadline_s), profile)
        for power_w in sorted((one_w, other_w))
    )
    assume(less.holds)
    assert profile.costs[more.setting].accuracy >= profile.costs[less.setting].accuracy
    assert more.holds


@given(profiles, loads, watts, watts, deadlines)
def test_more_watts_never_shed_more(
    profile: Profile, load: Load, one_w: float, other_w: float, deadline_s: float
) -> None:
    state = fresh(profile, load)
    able = any(one.latency_s <= 0.9 * deadline_s for one in state.forecasts(profile).values())
    assume(able)
    less, more = (
        choose(state, NOW, Limits(power_w=power_w, deadline_s=deadline_s), profile)
        for power_w in sorted((one_w, other_w))
    )
    assert more.admit >= less.admit


@given(profiles, loads, watts, deadlines, deadlines)
def test_more_time_never_costs_accuracy(
    profile: Profile, load: Load, power_w: float, one_s: float, other_s: float
) -> None:
    state = fresh(profile, load)
    sooner, later = (
        choose(state, NOW, Limits(power_w=power_w, deadline_s=deadline_s), profile)
        for deadline_s in sorted((one_s, other_s))
    )
    assume(sooner.holds)
    assert profile.costs[later.setting].accuracy >= profile.costs[sooner.setting].accuracy


PAIR = Profile(
    {Setting("good"): Cost(0.01, 0.10, 0.9), Setting("small"): Cost(0.005, 0.05, 0.8)}, idle_w=2.0
)  # at 20 requests a second: 4.0 W and 3.0 W
BUSY = Load(rate_hz=20.0, burstiness=0.0)


def test_credit_buys_a_turn_of_the_better_setting() -> None:
    limits = Limits(power_w=3.5)
    poor = replace(fresh(PAIR, BUSY), credit_j=3.0)
    rich = replace(fresh(PAIR, BUSY), credit_j=3.5)  # 3 % of 30 s at 3.5 W are 3.15 J
    assert choose(poor, NOW, limits, PAIR).setting == Setting("small")
    assert choose(rich, NOW, limits, PAIR).setting == Setting("good")


def test_better_setting_far_over_the_limit_gets_no_turn() -> None:
    limits = Limits(power_w=3.1, window_s=10.0)  # two seconds at 0.9 W over it are 6 % of the window
    state = replace(fresh(PAIR, BUSY), credit_j=1e9)
    assert choose(state, NOW, limits, PAIR).setting == Setting("small")


def test_no_setting_under_the_limit_sheds_to_it_and_says_so() -> None:
    decision = choose(fresh(PAIR, BUSY), NOW, Limits(power_w=2.5), PAIR)
    assert decision.setting == Setting("small")
    assert decision.admit == pytest.approx(0.5)
    assert (decision.holds, decision.reason) == (False, "no setting holds the limit")


def test_limit_under_the_idle_power_leaves_the_least_share() -> None:
    decision = choose(fresh(PAIR, BUSY), NOW, Limits(power_w=1.0), PAIR)
    assert decision.admit == pytest.approx(0.05)


def test_more_requests_than_any_setting_can_take_are_shed() -> None:
    decision = choose(fresh(PAIR, Load(rate_hz=1000.0)), NOW, Limits(deadline_s=0.05), PAIR)
    assert decision.setting == Setting("small")
    assert decision.admit == pytest.approx(0.85 / (1000 * 0.005))
    assert not decision.holds


def test_deadline_that_nothing_meets_takes_the_soonest_answer() -> None:
    decision = choose(fresh(PAIR, BUSY), NOW, Limits(deadline_s=0.001), PAIR)
    assert decision == Decision(Setting("small"), 1.0, holds=False, reason="no setting meets the deadline")


def test_batch_is_not_waited_for_beyond_the_deadline() -> None:
    profile = Profile(
        {Setting("good", batch=1): Cost(0.01, 0.1, 0.9), Setting("good", batch=8): Cost(0.02, 0.03, 0.9)}, 2.0
    )
    slow, fast = Load(rate_hz=20.0, burstiness=0.0), Load(rate_hz=90.0, burstiness=0.0)
    limits = Limits(deadline_s=0.2)
    assert choose(fresh(profile, slow), NOW, limits, profile).setting.batch == 1
    assert choose(fresh(profile, fast), NOW, limits, profile).setting.batch == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: Cost(0.0, 1.0, 0.5),
        lambda: Cost(1.0, 1.0, 1.5),
        lambda: Profile({}, 1.0),
        lambda: Limits(power_w=0.0),
        lambda: Limits(deadline_s=float("inf")),
        lambda: BatteryLimit(1.0, 0.0),
    ],
)
def test_impossible_values_are_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match="expected"):
        make()
