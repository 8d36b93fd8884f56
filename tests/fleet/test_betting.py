"""The test by betting: it may be asked after every value, and keeps what it promises."""

import math
import random

import pytest

from edgekit_fleet.rollouts.betting import log_capital


def test_mean_at_the_limit_is_seldom_claimed_to_be_above_at_any_look() -> None:
    """With alpha 0.05 at most 5 % of 1,000 runs, plus three standard errors of that share (0.7 %)."""
    random_values = random.Random(7)
    claims = 0
    for _ in range(1000):
        values: list[float] = []
        for _ in range(60):
            values.append(random_values.betavariate(1, 19))  # mean 0.05
            if log_capital(values, 0.05) >= -math.log(0.05):
                claims += 1
                break
    assert claims / 1000 <= 0.05 + 3 * 0.007


def test_narrow_values_above_the_limit_are_found_with_few() -> None:
    random_values = random.Random(8)
    values = [random_values.gauss(0.08, 0.02) for _ in range(40)]
    assert log_capital(values, 0.05) >= -math.log(0.001)
    assert log_capital(values[:5], 0.05) < -math.log(0.001)


def test_order_of_values_does_not_matter() -> None:
    values = [0.1, 0.9, 0.0, 0.4, 1.0]
    assert log_capital(values, 0.3) == pytest.approx(log_capital(sorted(values), 0.3), rel=1e-12)


def test_no_values_are_no_evidence() -> None:
    assert log_capital([], 0.5) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("limit", [0.0, -1.0, 1.5, float("nan")])
def test_limit_out_of_range_is_refused(limit: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0 and at most 1"):
        log_capital([0.5], limit)
