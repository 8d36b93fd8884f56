"""Which requests become samples, and with which probability: by simulation, on a clock of the test's own."""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable

import pytest

from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger
from edgekit_runtime.samples.draws import Draws, Line, Selection, pull_kept

HOUR_S, DAY_S = 3600.0, 86_400.0


def make_order(
    *kinds: str, order: str = "o-1", per_day: float = 20.0, max_bytes: int = 1 << 20
) -> SampleOrder:
    return SampleOrder(
        id=order,
        model="m",
        triggers=tuple(SampleTrigger(kind=kind) for kind in kinds),
        per_day=per_day,
        max_bytes=max_bytes,
        ends_at=1e10,
        public_key="",
    )


def simulate(
    draws: Draws,
    count: int,
    *,
    at_s: Callable[[int], float],
    fits: Callable[[Line, int], bool],
    refresh_each: int = 1000,
) -> list[tuple[int, Selection]]:
    """Return number and selection of the samples among `count` requests, at the times `at_s(number)`."""
    number, samples = 0, []
    while number < count:
        if number % refresh_each == 0:
            draws.refresh(at_s(number))
        step = min(draws.countdown, refresh_each - number % refresh_each, count - number)
        draws.countdown -= step
        number += step
        if draws.countdown > 0:
            continue
        draw = draws.draw(at_s(number - 1))
        fitting = [fits(line, number - 1) for line in draw.lines]
        samples += [(number - 1, selection) for selection in draw.select(fitting)]
        draw.settle(fitting)
    return samples


def make_draws(seed: int, *orders: SampleOrder) -> Draws:
    draws = Draws(0.0, random.Random(seed).random)
    draws.set_orders(orders, 0.0)
    return draws


def fits_some(line: Line, number: int) -> bool:
    """Each 20th request is uncertain, each 30th drifts; some do both."""
    return {"random": True, "uncertain": number % 20 == 0, "drift": number % 30 == 0}[line.trigger.kind]


@pytest.mark.parametrize("gap_s", [4.0, 60.0, 5000.0])
def test_as_many_samples_come_as_are_ordered_whatever_the_rate_of_requests(gap_s: float) -> None:
    days = 14
    count = int(days * DAY_S / gap_s)
    order = make_order("random", per_day=20.0)

    each = max(1, int(1000 / gap_s))
    samples = simulate(
        make_draws(1, order), count, at_s=lambda number: gap_s * number, fits=fits_some, refresh_each=each
    )

    most = min(20 * days, count)
    assert 0.8 * most <= len(samples) <= 20 * days + 4


def test_estimates_weighted_by_probabilities_are_unbiased_where_plain_means_are_not(is_long: bool) -> None:
    """Requests that are uncertain are wrong more often, and mornings have more of them."""
    chance, count = random.Random(7), 6000
    wrong = [chance.random() < (0.6 if number % 20 == 0 else 0.1) for number in range(count)]
    truth, weighted, plain = statistics.mean(wrong), [], []
    order = make_order("random", "uncertain", "drift", per_day=8000.0)
    for seed in range(60 if is_long else 15):
        samples = simulate(
            make_draws(seed, order),
            count,
            at_s=lambda number: 1.1 * number + 0.9 * abs(number % 3000 - 1500),
            fits=fits_some,
            refresh_each=50,
        )
        # From request 1000 on, since each must have a probability.
        late = [(number, selection.probability) for number, selection in samples if number >= 1000]
        weighted.append(sum(wrong[number] / probability for number, probability in late) / (count - 1000))
        plain.append(statistics.mean(wrong[number] for number, _ in late))
    truth = statistics.mean(wrong[1000:])
    deviation = statistics.stdev(weighted) / math.sqrt(len(weighted))

    assert abs(statistics.mean(weighted) - truth) < 4 * deviation
    assert abs(statistics.mean(plain) - truth) > 0.05


def test_a_burst_after_a_quiet_day_takes_no_more_than_the_credit() -> None:
    order = make_order("random", per_day=20.0)

    samples = simulate(
        make_draws(3, order),
        20_000,
        at_s=lambda number: HOUR_S * number if number < 48 else 48 * HOUR_S + 0.001 * number,
        fits=fits_some,
    )

    assert len([number for number, _ in samples if number >= 48]) <= 6


def test_one_credit_holds_for_all_triggers_of_an_order() -> None:
    order = make_order("random", "uncertain", "drift", per_day=20.0)

    samples = simulate(make_draws(4, order), 10 * 1440, at_s=lambda number: 60.0 * number, fits=fits_some)

    kinds = {line.trigger.kind for _, selection in samples for line in selection.lines}
    assert len(samples) <= 204
    assert kinds == {"random", "uncertain", "drift"}


def test_probabilities_join_over_the_triggers_that_fit_whichever_drew() -> None:
    draws = make_draws(5, make_order("random", "uncertain"), make_order("random", order="o-2"))
    for line, probability in zip(draws.lines, (0.2, 0.5, 0.3), strict=True):
        line.probability = probability
    draws.countdown = 1
    while not (draw := draws.draw(1e5)).hits[1] or draw.probabilities != (0.2, 0.5, 0.3):
        for line, probability in zip(draws.lines, (0.2, 0.5, 0.3), strict=True):
            line.probability = probability

    chosen = {selection.lines[0].order.id: selection for selection in draw.select((True, True, True))}
    assert chosen["o-1"].probability == pytest.approx(1 - 0.8 * 0.5)
    assert all(
        selection.probability == pytest.approx(0.3) for key, selection in chosen.items() if key == "o-2"
    )
    unfit = {selection.lines[0].order.id: selection for selection in draw.select((False, True, False))}
    assert unfit["o-1"].probability == pytest.approx(0.5)


def test_without_room_nothing_is_drawn_and_the_credit_stays() -> None:
    draws = make_draws(6, make_order("random", per_day=1000.0))
    draws.lines[0].has_room = False

    assert simulate(draws, 1000, at_s=lambda number: 60.0 * number, fits=fits_some) == []
    draws.lines[0].has_room = True
    assert simulate(draws, 1000, at_s=lambda number: 60_000.0 + number, fits=fits_some)


def test_an_application_keeps_as_many_requests_as_the_order_allows() -> None:
    order = make_order("kept", per_day=5.0)
    greedy = dataclasses.replace(order, triggers=(SampleTrigger(kind="kept", per_day=1000.0),))
    draws = make_draws(8, greedy)

    pulled = [pull_kept(draws.lines, 0.0) for _ in range(8)]

    assert [draw is not None for draw in pulled] == [True] * 5 + [False] * 3
    assert pulled[0] is not None
    assert pulled[0].select(pulled[0].hits)[0].probability == 1
    assert pull_kept(draws.lines, DAY_S) is not None


def test_an_order_that_stays_goes_on_when_others_come_and_go() -> None:
    first, second = make_order("random"), make_order("random", order="o-2")
    draws = make_draws(9, first)
    line = draws.lines[0]

    draws.set_orders((first, second), 1.0)
    assert draws.lines[0] is line
    draws.set_orders((), 2.0)
    assert draws.lines == ()
    assert draws.countdown > 1 << 60
