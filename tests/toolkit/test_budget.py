import math
from collections.abc import Mapping

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.toolkit.cases import cases

from edgekit_toolkit.selection.budget import DEFAULT_LIMITS, UNITS, Budget, parse_budget


@cases(
    ("text", "name", "limit"),
    [
        ("size=10MB", "size", 10e6),
        ("size=1.5GB", "size", 1.5e9),
        ("size=200kB", "size", 200e3),
        ("size=200KB", "size", 200e3),
        ("size=4KiB", "size", 4096),
        ("size=2 MiB", "size", 2 * 2**20),
        ("size=1GiB", "size", 2**30),
        ("size=12B", "size", 12),
        ("memory=64MB", "memory", 64e6),
        ("memory=.5MiB", "memory", 2**19),
        ("latency=5ms", "latency", 5),
        ("latency=250us", "latency", 0.25),
        ("latency=250µs", "latency", 0.25),
        ("latency=0.1s", "latency", 100),
        ("latency=1e-2s", "latency", 10),
        ("energy=20mJ", "energy", 20),
        ("energy=500uJ", "energy", 0.5),
        ("energy=2J", "energy", 2000),
        ("drop=1%", "drop", 1),
        ("drop=0", "drop", 0),
        ("size=0.0", "size", 0),
        ("drop=0.5pt", "drop", 0.5),
        ("size=4.35MB", "size", 4_350_000),
        ("size=0.29MB", "size", 290_000),
    ],
)
def test_limit_is_read_in_its_unit(text: str, name: str, limit: float) -> None:
    assert parse_budget(text).limits[name] == limit


_BYTES = {"B": 1, "kB": 1000, "KB": 1000, "MB": 1000**2, "GB": 1000**3}
_BYTES |= {"KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
FACTORS = {
    "size": _BYTES,
    "transport": _BYTES,
    "latency": {"us": 0.001, "µs": 0.001, "ms": 1, "s": 1000},
    "memory": _BYTES,
    "energy": {"uJ": 0.001, "µJ": 0.001, "mJ": 1, "J": 1000},
    "drop": {"%": 1, "pt": 1},
}


@cases(
    ("name", "unit", "factor"),
    [(name, unit, factor) for name, factors in FACTORS.items() for unit, factor in factors.items()],
)
def test_each_unit_of_each_limit_has_its_factor(name: str, unit: str, factor: float) -> None:
    assert parse_budget(f"{name}=3{unit}").limits[name] == pytest.approx(3 * factor, rel=1e-12)


def test_units_are_those_with_a_factor_above() -> None:
    assert {name: list(factors) for name, (_, factors) in UNITS.items()} == {
        name: list(factors) for name, factors in FACTORS.items()
    }


def test_limits_that_are_not_given_have_their_defaults_or_are_not_there() -> None:
    assert parse_budget("").limits == DEFAULT_LIMITS == {"size": 10_000_000, "drop": 1}
    assert parse_budget(" latency = 5 ms , drop=2%, ").limits == {"size": 10e6, "drop": 2, "latency": 5}


@cases(
    ("text", "said"),
    [
        ("weight=3", "NAME one of size, transport, latency, memory, energy, drop"),
        ("size", "expected NAME=VALUE"),
        ("10MB", "expected NAME=VALUE"),
        ("=10MB", "expected NAME=VALUE"),
        ("size=", "expected a number"),
        ("size=MB", "expected a number"),
        ("size=10 parsecs", "one of B, kB"),
        ("size=10ms", "one of B, kB"),
        ("latency=10MB", "one of us, µs, ms, s"),
        ("latency=5MS", "one of us, µs, ms, s"),
        (
            "size=2",
            "'size=2': has no unit; give one of B, kB, KB, MB, GB, KiB, MiB, GiB, for example size=2MB",
        ),
        ("memory=64", "has no unit; give one of B, kB, KB, MB, GB, KiB, MiB, GiB, for example memory=64MB"),
        ("latency=5", "has no unit; give one of us, µs, ms, s, for example latency=5ms or latency=0.1s"),
        ("energy=20", "has no unit; give one of uJ, µJ, mJ, J, for example energy=20mJ or energy=0.5J"),
        ("drop=0.01", "has no unit; give one of %, pt, for example drop=1%"),
        ("size=-1MB", "expected a number"),
        ("size=nan", "expected a number"),
        ("size=inf", "expected a number"),
        ("drop=infinity%", "expected a number"),
        ("size=0x10", "expected a number"),
        ("size=1_000", "expected a number"),
        ("size=1e400B", "more than a number can hold"),
        ("size=1e308GB", "more than a number can hold"),
        ("size=1e99999999999999999999B", "expected a number"),
        ("size=1MB=2MB", "expected a number"),
        ("size=1MB;latency=3", "expected a number"),
        ("size=1MB,size=2MB", "size is given twice"),
        ("size=10MB, size=10MB", "size is given twice"),
    ],
)
def test_text_that_is_no_budget_is_refused_with_what_was_expected(text: str, said: str) -> None:
    with pytest.raises(click.BadParameter) as refusal:
        parse_budget(text)
    assert said in refusal.value.message


@given(st.text(alphabet="sizeldrop=,.0123456789eE+-MBkmus% ", max_size=24))
def test_any_text_is_a_budget_or_is_refused(text: str) -> None:
    try:
        limits = parse_budget(text).limits
    except click.BadParameter:
        return
    assert all(name in UNITS and 0 <= value < math.inf for name, value in limits.items())


@cases("limits", [{"weight": 1.0}, {"size": -1.0}, {"size": math.nan}, {"size": math.inf}])
def test_budget_of_a_limit_that_is_none_cannot_be_made(limits: Mapping[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(limits))):
        Budget(limits)


def test_limits_that_are_exceeded_are_named_in_order() -> None:
    budget = Budget({"size": 100.0, "latency": 5.0, "drop": 1.0})
    assert budget.violations({"size": 101.0, "latency": 5.0, "drop": 1.5}) == ("size", "drop")
    assert budget.violations({"size": 100.0, "latency": 5.0, "drop": 1.0}) == ()


def test_figure_without_a_limit_exceeds_nothing() -> None:
    assert Budget({"size": 100.0}).violations({"latency": 1e9, "size": 1.0}) == ()


def test_limit_without_a_figure_is_not_kept_silently() -> None:
    with pytest.raises(KeyError):
        Budget({"size": 100.0}).violations({"latency": 1.0})


@pytest.mark.parametrize("figure", [math.inf, math.nan])
def test_figure_that_is_not_known_exceeds_its_limit(figure: float) -> None:
    assert Budget({"energy": 1e300}).violations({"energy": figure}) == ("energy",)


def test_excess_is_the_sum_of_shares_over_the_limits() -> None:
    budget = Budget({"size": 100.0, "latency": 4.0, "drop": 1.0})
    # 50 % over the size, 25 % over the latency; a drop below its limit makes up for nothing.
    assert budget.excess({"size": 150.0, "latency": 5.0, "drop": 0.0}) == pytest.approx(0.75)
    assert budget.excess({"size": 100.0, "latency": 4.0, "drop": 1.0}) == 0


def test_excess_over_a_limit_below_one_is_a_share_of_that_limit() -> None:
    assert Budget({"drop": 0.25}).excess({"drop": 1.0}) == pytest.approx(3)


def test_excess_over_a_limit_of_zero_is_large_and_finite() -> None:
    assert Budget({"drop": 0.0}).excess({"drop": 0.5}) == pytest.approx(0.5e9)
