import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.toolkit.cases import cases

from edgekit_toolkit.selection.budget import Budget, parse_budget
from edgekit_toolkit.selection.choice import (
    COSTS,
    MOST_FOR_GPU,
    SAME_HOST_TIME,
    SAME_LATENCY,
    CandidateFigures,
    choose,
    pareto_front,
    rank_further,
)


def candidate(
    name: str,
    *,
    size: float = 1e6,
    latency: float = 10.0,
    memory: float = 1e6,
    energy: float = 1.0,
    drop: float = 0.0,
    uncertainty: float = 1.0,
    host: float = math.inf,
) -> CandidateFigures:
    figures = {"size": size, "latency": latency, "memory": memory, "energy": energy, "drop": drop}
    return CandidateFigures(
        name,
        f"form {name}",
        figures,
        latency_uncertainty=uncertainty,
        host_ratio=host,
    )


def test_fastest_candidate_that_keeps_every_limit_is_chosen() -> None:
    found = choose(
        [
            candidate("A", latency=1, drop=5),
            candidate("B", latency=2, size=20e6),
            candidate("C", latency=4),
            candidate("D", latency=8),
        ],
        Budget({"size": 10e6, "drop": 1.0}),
    )
    assert found.chosen == "C"
    assert (found.binding, found.closest, found.needed) == ((), None, None)
    assert "form C" in found.reason


def in_transit(name: str, *, drop: float, error: float, snr_db: float, host: float = 1.0) -> CandidateFigures:
    figures = {**candidate(name, drop=drop).figures, "transport": 9e3}
    return replace(
        candidate(name, host=host, uncertainty=1.4), figures=figures, drop_error=error, snr_db=snr_db
    )


def test_limited_transport_and_drops_alike_by_chance_choose_the_least_noise() -> None:
    few_samples = [
        in_transit("A", drop=0, error=4, snr_db=12.5, host=0.8),
        in_transit("B", drop=4, error=4, snr_db=12.9, host=0.95),
    ]
    choice = choose(few_samples, Budget({"transport": 9.1e3, "drop": 90.0}))
    assert choice.chosen == "B"
    assert "the drops of 2 differ by chance at most, and its output has the least noise" in choice.reason


def test_limited_transport_and_drops_apart_choose_the_least_drop() -> None:
    many_samples = [
        in_transit("A", drop=0, error=0.4, snr_db=12.5),
        in_transit("B", drop=4, error=0.4, snr_db=12.9),
    ]
    assert choose(many_samples, Budget({"transport": 9.1e3})).chosen == "A"


def test_limited_transport_chooses_int8_that_is_clearly_faster() -> None:
    candidates = [
        in_transit("A", drop=0, error=4, snr_db=12.5, host=0.5),
        in_transit("B", drop=0, error=4, snr_db=12.9, host=0.95),
    ]
    assert choose(candidates, Budget({"transport": 9.1e3})).chosen == "A"


def test_single_candidate_that_keeps_every_limit_is_chosen_as_the_only_one() -> None:
    found = choose([candidate("A"), candidate("B", drop=2)], Budget({"drop": 1.0}))
    assert (found.chosen, found.reason) == ("A", "form A: the only one that keeps every limit")


@pytest.mark.parametrize(
    ("second", "said"),
    [
        (1.1, "the smallest of 2 within 15 % of the fastest, measured on this machine"),
        (1.2, "the fastest measured on this machine"),
    ],
)
def test_choice_by_times_measured_on_the_target_says_so(second: float, said: str) -> None:
    found = choose([candidate("A", size=5e5, host=1.0), candidate("B", host=second)], Budget({}))
    assert (found.chosen, found.reason) == ("A", f"form A: within every limit; {said}")


def test_all_five_limits_hold_at_once() -> None:
    limits = {"size": 10e6, "latency": 10.0, "memory": 10e6, "energy": 10.0, "drop": 1.0}
    breaking = [
        candidate("S", size=11e6),
        candidate("L", latency=11),
        candidate("M", memory=11e6),
        candidate("E", energy=11),
        candidate("D", drop=1.1),
    ]
    slow = candidate("ok", size=10e6, latency=10, memory=10e6, energy=10, drop=1.0)
    assert choose([*breaking, slow], Budget(limits)).chosen == "ok"
    refused = choose(breaking, Budget(limits))
    assert refused.chosen is None
    assert refused.binding == ("size", "latency", "memory", "energy", "drop")


def test_of_equally_fast_candidates_the_smallest_is_chosen() -> None:
    near = candidate("near", latency=10 * (1 + SAME_HOST_TIME) - 1e-9, size=1e6)
    beyond = candidate("beyond", latency=10 * (1 + SAME_HOST_TIME) + 1e-6, size=1e5)
    assert choose([candidate("fast", size=2e6), near, beyond], Budget({})).chosen == "near"


def test_tie_in_latency_and_size_is_decided_by_the_drop_and_then_by_the_id() -> None:
    assert choose([candidate("A", drop=0.5), candidate("B", drop=0.1)], Budget({})).chosen == "B"
    assert choose([candidate("B"), candidate("A")], Budget({})).chosen == "A"


def test_order_of_the_candidates_does_not_matter() -> None:
    some = [
        candidate("A", latency=1, drop=3),
        candidate("B", size=2e6),
        candidate("C"),
        candidate("D", drop=9),
    ]
    for limits in ({}, {"drop": 1.0}, {"size": 1e5, "drop": 1.0}):
        assert choose(some, Budget(limits)) == choose(some[::-1], Budget(limits))


def test_refusal_names_the_limit_that_stands_alone_in_the_way() -> None:
    found = choose(
        [candidate("A", latency=30), candidate("B", latency=12), candidate("C", latency=5, drop=4)],
        Budget({"size": 10e6, "latency": 10.0, "drop": 1.0}),
    )
    assert found.chosen is None
    # Either limit alone keeps somebody out: B lacks only speed, C only accuracy.
    assert found.binding == ("latency", "drop")
    assert found.closest == "B"
    assert "latency at most 10ms, the least with the other limits kept is 12ms" in found.reason
    assert "drop at most 1%, the least with the other limits kept is 4%" in found.reason
    assert found.needed == "allow latency=12ms for form B (B), or a smaller model"


def test_refusal_names_what_the_smallest_candidate_of_all_costs() -> None:
    found = choose(
        [candidate("A", size=3e4), candidate("B", size=5e3, drop=40)], Budget({"size": 1e3, "drop": 1.0})
    )
    assert (
        "size at most 1kB, the least with the other limits kept is 30kB, and 5kB at drop=40%" in found.reason
    )


def test_refusal_where_one_limit_is_not_enough_names_those_of_the_closest() -> None:
    found = choose(
        [candidate("A", size=20e6, latency=40), candidate("B", size=15e6, latency=12)],
        Budget({"size": 10e6, "latency": 10.0, "drop": 1.0}),
    )
    assert found.binding == ("size", "latency")
    assert found.closest == "B"
    assert "size at most 10MB, the least of any candidate is 15MB" in found.reason
    assert found.needed == "allow size=15MB,latency=12ms for form B (B), or a smaller model"


def test_unknown_figure_keeps_no_limit_on_it_and_is_said_to_be_unknown() -> None:
    unknown = [candidate("A", energy=math.inf), candidate("B", energy=math.inf, latency=20)]
    assert choose(unknown, Budget({"size": 10e6})).chosen == "A"
    found = choose(unknown, Budget({"size": 10e6, "energy": 1e12}))
    assert found.chosen is None
    assert found.binding == ("energy",)
    assert "the least with the other limits kept is not known" in found.reason
    assert found.needed is not None
    assert found.needed.startswith("set no limit on energy, which cannot be told here, for form A (A)")


def test_refusal_tells_known_and_unknown_figures_apart() -> None:
    found = choose([candidate("A", energy=math.inf, size=20e6)], Budget({"size": 10e6, "energy": 5.0}))
    assert found.needed is not None
    assert found.needed.startswith("allow size=20MB and set no limit on energy")


@cases(
    ("size", "shown"),
    [(100_000, "0.1MB"), (99_900, "99.9kB"), (1_500, "1.5kB"), (123_456_789, "123MB"), (1_126_000, "1.13MB")],
)
def test_refusal_shows_sizes_with_three_digits(size: float, shown: str) -> None:
    found = choose([candidate("A", size=size)], Budget({"size": 1e3}))
    assert f"size at most 1kB, the least with the other limits kept is {shown}" in found.reason


def test_refusal_rounds_what_it_asks_for_up_and_what_it_tells_to_the_nearest() -> None:
    found = choose([candidate("A", latency=12.341)], Budget({"latency": 10.0}))
    assert "the least with the other limits kept is 12.3ms" in found.reason
    assert found.needed == "allow latency=12.4ms for form A (A), or a smaller model"


def test_refusal_that_asks_for_one_known_and_two_unknown_limits_names_all() -> None:
    only = candidate("A", size=20e6, energy=math.inf, memory=math.inf)
    found = choose([only], Budget({"size": 10e6, "memory": 1e6, "energy": 5.0}))
    assert found.binding == ("size", "memory", "energy")
    assert found.needed is not None
    assert found.needed.startswith("allow size=20MB and set no limit on memory or energy, which")


@cases(
    ("large", "small", "chosen"),
    [
        (1.0, 1.15, "small"),
        (1.0, 1.16, "large"),
        (0.5, 0.57, "small"),
        (0.5, 0.58, "large"),
        (2.0, 1.0, "small"),
    ],
)
@cases("uncertainty", [1.0, 1.4])
def test_smallest_within_fifteen_percent_of_the_least_time_here_is_chosen(
    large: float, small: float, chosen: str, uncertainty: float
) -> None:
    some = [
        candidate("large", host=large, size=2e6, uncertainty=uncertainty),
        candidate("small", host=small, uncertainty=uncertainty),
    ]
    assert choose(some, Budget({})).chosen == chosen


def modelled(name: str, latency: float, host: float, size: float = 1e6) -> CandidateFigures:
    return candidate(name, latency=latency, host=host, size=size, uncertainty=1.4)


def test_modelled_latency_decides_beyond_its_uncertainty() -> None:
    found = choose([modelled("float", 10, 1.0), modelled("int8", 6, 1.3)], Budget({}))
    assert found.chosen == "int8"
    assert "the fastest as predicted for the target, by more than its uncertainty of 1.4 x" in found.reason


@pytest.mark.parametrize(("latency_ms", "chosen"), [(13.9, "small"), (14.0, "small"), (14.1, "fast")])
def test_latencies_that_the_model_cannot_tell_apart_without_a_measurement_are_chosen_by_size(
    latency_ms: float, chosen: str
) -> None:
    some = [
        candidate("fast", uncertainty=1.4),
        candidate("small", latency=latency_ms, size=5e5, uncertainty=1.4),
    ]
    found = choose(some, Budget({}))
    assert found.chosen == chosen
    alike = chosen == "small"
    assert ("the smallest of the fastest as far as the target's model can tell" in found.reason) == alike


def test_within_the_uncertainty_of_the_model_the_measured_order_decides() -> None:
    found = choose([modelled("float", 10, 1.0), modelled("int8", 8, 1.3, size=1e5)], Budget({}))
    assert found.chosen == "float"
    assert (
        "the fastest measured on this machine, of 2 alike within 1.4 x as predicted for the target"
        in found.reason
    )


def test_smallest_of_the_fastest_is_only_said_of_several() -> None:
    some = [
        modelled("float", 10, 1.0, size=4e6),
        modelled("half", 10, 1.01, size=2e6),
        modelled("slow", 9, 2.0, 1),
    ]
    found = choose(some, Budget({}))
    assert found.chosen == "half"
    assert "the smallest of 2 within 15 % of the fastest, measured on this machine" in found.reason
    assert "of 3 alike within 1.4 x as predicted for the target" in found.reason


def test_only_candidate_that_keeps_the_limits_is_not_called_the_fastest() -> None:
    found = choose([modelled("float", 10, 1.0), modelled("int8", 1, 0.1, size=9e6)], Budget({"size": 2e6}))
    assert found.reason == "form float: the only one that keeps every limit"


def test_of_candidates_alike_here_in_latency_and_size_the_most_accurate_is_chosen() -> None:
    some = [
        candidate(name, host=host, drop=drop, uncertainty=1.4)
        for name, host, drop in (("A", 1.0, 0.5), ("B", 1.05, 0.1))
    ]
    assert choose(some, Budget({})).chosen == "B"


def test_order_of_this_machine_does_not_decide_for_a_gpu() -> None:
    some = [
        modelled("float", 10, 1.0, size=4e6),
        modelled("half", 10, 1.14, size=2e6),
        modelled("fast", 10, 0.4, size=3e6),
        modelled("slow", 10, 1.3, size=1e6),
    ]
    found = choose(some, Budget({}), on_gpu=True)
    assert found.chosen == "half"
    assert "the smallest that is not over 1.15 x float32 on this machine" in found.reason
    assert "whose processor cannot tell which is faster on a GPU, of 4 alike within 1.4 x" in found.reason
    assert choose(some, Budget({})).chosen == "fast"


@pytest.mark.parametrize(("ratio", "chosen"), [(MOST_FOR_GPU, "small"), (MOST_FOR_GPU + 0.01, "float")])
def test_form_for_a_gpu_that_is_slower_than_float32_here_is_left_out(ratio: float, chosen: str) -> None:
    """Whatever its spread: the report would say in one place that it is slower, and in another that not."""
    small = candidate("small", host=ratio, size=5e5, uncertainty=1.4)
    assert choose([modelled("float", 10, 1.0), small], Budget({}), on_gpu=True).chosen == chosen


def test_forms_for_a_gpu_that_are_all_slow_here_are_chosen_by_size() -> None:
    some = [modelled("large", 10, 1.2, size=4e6), modelled("small", 10, 1.5)]
    found = choose(some, Budget({}), on_gpu=True)
    assert found.chosen == "small"
    assert "the smallest, all being over 1.15 x float32 on this machine" in found.reason


def test_model_of_a_gpu_decides_beyond_its_uncertainty() -> None:
    some = [modelled("float", 10, 1.0), modelled("int8", 6, 3.0, size=2e6)]
    assert choose(some, Budget({}), on_gpu=True).chosen == "int8"


def test_candidate_that_cannot_be_modelled_is_compared_by_what_was_measured_here() -> None:
    dynamic = candidate("dynamic", latency=math.inf, host=0.5, size=5e5, uncertainty=1.4)
    found = choose([modelled("float", 10, 1.0), modelled("slow", 16, 0.1), dynamic], Budget({}))
    assert found.chosen == "dynamic"
    assert "of 1 alike within 1.4 x as predicted for the target and 1 that cannot be modelled" in found.reason
    slower = candidate("dynamic", latency=math.inf, host=1.2, size=5e5, uncertainty=1.4)
    assert choose([modelled("float", 10, 1.0), slower], Budget({})).chosen == "float"


def test_without_a_model_the_fastest_here_is_chosen_and_not_the_smallest() -> None:
    some = [
        candidate("large", latency=math.inf, host=0.5, size=2e6, uncertainty=1.4),
        candidate("small", latency=math.inf, host=1.0, uncertainty=1.4),
    ]
    found = choose(some, Budget({}))
    assert found.chosen == "large"
    assert "measured on this machine, since latency on the target cannot be modelled" in found.reason


def test_times_on_the_target_itself_count_more_than_latencies_that_others_slow_down() -> None:
    some = [candidate("A", latency=1, host=9.0), candidate("B", latency=2, host=1.0)]
    assert choose(some, Budget({})).chosen == "B"


@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 1.2, 1.5, 3.0, math.inf]), st.sampled_from([0.5, 1.0, 1.01, 2.0])),
        min_size=1,
        max_size=6,
    )
)
def test_nothing_shows_another_candidate_to_be_faster_than_the_choice(
    points: list[tuple[float, float]],
) -> None:
    some = {str(number): modelled(str(number), *point) for number, point in enumerate(points)}
    found = choose(list(some.values()), Budget({})).chosen
    assert found is not None
    latency, host = some[found].figures["latency"], some[found].host_ratio
    least = min(one.figures["latency"] for one in some.values())
    assert latency <= 1.4 * least or math.isinf(latency)
    for one in some.values():
        if one.figures["latency"] <= 1.4 * least or math.isinf(one.figures["latency"]):
            assert host <= one.host_ratio * (1 + SAME_HOST_TIME)


@cases(
    "wrong",
    [
        {"uncertainty": 0.9},
        {"uncertainty": math.nan},
        {"host": 0.0},
        {"host": -1.0},
        {"host": math.nan},
    ],
)
def test_impossible_evidence_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="'A': expected an uncertainty of at least 1"):
        candidate("A", **wrong)


def test_candidates_of_which_no_latency_is_known_at_all_are_chosen_by_size() -> None:
    some = [candidate("A", latency=math.inf, size=2e6), candidate("B", latency=math.inf)]
    found = choose(some, Budget({}))
    assert (found.chosen, found.reason) == ("B", "form B: within every limit; the smallest of the fastest")


@cases("cost", COSTS)
def test_candidate_whose_figure_is_missing_or_no_number_cannot_be_made(cost: str) -> None:
    figures = dict(candidate("A").figures)
    with pytest.raises(ValueError, match=f"'A': no figure for {cost}"):
        CandidateFigures("A", "", {**figures, cost: math.nan})
    del figures[cost]
    with pytest.raises(ValueError, match=f"'A': no figure for {cost}"):
        CandidateFigures("A", "", figures)


@given(
    st.builds(
        candidate,
        st.just("A"),
        size=st.integers(1, 10**11).map(float),
        latency=st.floats(1e-4, 1e6),
        memory=st.integers(1, 10**11).map(float),
        energy=st.floats(1e-4, 1e6),
        drop=st.floats(0, 100),
    )
)
def test_budget_that_a_refusal_asks_for_is_enough(only: CandidateFigures) -> None:
    tight = Budget({name: value / 2 for name, value in only.figures.items()})
    refused = choose([only], tight)
    assert refused.needed is not None
    asked = refused.needed.removeprefix("allow ").partition(" ")[0]
    assert choose([only], Budget({**tight.limits, **parse_budget(asked).limits})).chosen == "A"


FIGURES = st.sampled_from([0.0, 1.0, 2.0, math.inf])


@given(st.lists(st.tuples(*[FIGURES] * len(COSTS)), max_size=8))
def test_front_is_what_no_other_candidate_beats(points: Sequence[Sequence[float]]) -> None:
    some = [
        CandidateFigures(str(number), "", dict(zip(COSTS, point, strict=True)))
        for number, point in enumerate(points)
    ]
    beaten = {
        one
        for one, other in product(range(len(points)), repeat=2)
        if points[other] != points[one]
        and all(a <= b for a, b in zip(points[other], points[one], strict=True))
    }
    assert pareto_front(some) == {str(number) for number in range(len(points)) if number not in beaten}


def test_choice_among_forms_alike_on_the_target_is_on_the_front() -> None:
    rivals = [
        candidate("A", size=29530, uncertainty=1.4, host=0.9),
        candidate("B", size=29569, latency=10.5, uncertainty=1.4, host=0.7),
    ]
    assert choose(rivals, Budget({})).chosen == "B"
    assert "B" in pareto_front(rivals)


@given(
    st.lists(st.tuples(*[st.sampled_from([0.5, 1.0, 1.01, 2.0])] * len(COSTS)), min_size=1, max_size=6),
    st.dictionaries(st.sampled_from(COSTS), st.sampled_from([0.5, 1.0, 1.5]), max_size=4),
)
def test_choice_keeps_all_limits_whenever_any_candidate_does(
    points: Sequence[Sequence[float]], limits: dict[str, float]
) -> None:
    some = [
        CandidateFigures(str(number), "", dict(zip(COSTS, point, strict=True)))
        for number, point in enumerate(points)
    ]
    keeping = {
        one.id: one.figures
        for one in some
        if all(one.figures[name] <= limit for name, limit in limits.items())
    }
    found = choose(some, Budget(limits))
    if keeping:
        assert found.chosen in keeping
        fastest = min(figures["latency"] for figures in keeping.values())
        assert keeping[found.chosen]["latency"] <= fastest * (1 + SAME_LATENCY)
    else:
        assert found.chosen is None
        assert found.closest in {one.id for one in some}
        assert set(found.binding) <= limits.keys()
        assert found.binding


def ranked(*candidates: CandidateFigures, limits: dict[str, float] | None = None) -> list[str]:
    return [one.id for one in rank_further(candidates, Budget(limits or {}))]


def test_further_candidates_come_by_accuracy_then_by_latency() -> None:
    fast = candidate("fast", latency=1, drop=0.9)
    good = candidate("good", latency=5, drop=0.0)
    middle = candidate("middle", latency=2, drop=0.5)
    small = candidate("small", latency=6, drop=0.9, size=1e5)
    assert ranked(fast, good, middle, small) == ["good", "middle", "fast", "small"]


def test_further_candidates_keep_every_limit() -> None:
    slow, wrong = candidate("slow", latency=20, drop=0.0), candidate("wrong", latency=5, drop=2.0)
    assert ranked(candidate("ok"), slow, wrong, limits={"latency": 15.0, "drop": 1.0}) == ["ok"]


def test_candidate_that_another_one_makes_pointless_is_no_further_one() -> None:
    same = candidate("same", latency=10 * (1 + SAME_LATENCY / 2), size=2e6)
    assert ranked(candidate("best"), same, candidate("large", size=3e6, latency=11)) == ["best"]
    assert ranked(candidate("a", memory=1), candidate("b", memory=2)) == ["a", "b"]


@pytest.mark.parametrize(("latency_ms", "left"), [(13.9, ["A", "B"]), (14.0, ["A", "B"]), (14.1, ["A"])])
def test_candidate_of_one_size_and_drop_is_left_while_it_is_as_fast_within_the_uncertainty(
    latency_ms: float, left: list[str]
) -> None:
    """The other one takes 10 ms, with an uncertainty of 1.4."""
    some = candidate("A", uncertainty=1.4), candidate("B", latency=latency_ms, uncertainty=1.4)
    assert ranked(*some) == left


@cases("better", [{"size": 5e5}, {"drop": 0.1}])
@cases(("latency_ms", "left"), [(13.9, ["A"]), (14.0, ["A"]), (14.1, ["A", "B"]), (5.0, ["A"])])
def test_better_candidate_replaces_another_one_that_it_is_as_fast_as_within_the_uncertainty(
    latency_ms: float, left: list[str], better: dict[str, float]
) -> None:
    """The other one takes 10 ms."""
    one = candidate("A", latency=latency_ms, uncertainty=1.4, **{"drop": 0.5} | better)
    assert sorted(ranked(one, candidate("B", drop=0.5, uncertainty=1.4))) == left


@pytest.mark.parametrize(("latency_ms", "left"), [(10.29, ["A"]), (10.31, ["A", "B"])])
def test_smaller_candidate_replaces_another_one_within_three_percent_of_what_was_measured(
    latency_ms: float, left: list[str]
) -> None:
    """The other one takes 10 ms."""
    assert sorted(ranked(candidate("A", latency=latency_ms, size=5e5), candidate("B"))) == left


def test_candidates_that_are_better_in_one_figure_each_are_both_left() -> None:
    assert ranked(candidate("A", size=2e6, drop=0.1), candidate("B", drop=0.2)) == ["A", "B"]


def test_candidates_alike_in_every_figure_are_all_left() -> None:
    assert ranked(candidate("A", size=float("2e6")), candidate("B", size=float("2e6"))) == ["A", "B"]


@given(st.lists(st.tuples(*[st.floats(0.1, 10)] * 3), min_size=1, max_size=8))
def test_something_is_left_of_candidates_that_keep_all_limits(figures: list[tuple[float, ...]]) -> None:
    candidates = [
        candidate(f"C{index}", size=size, latency=latency, drop=drop)
        for index, (size, latency, drop) in enumerate(figures)
    ]
    assert ranked(*candidates)
