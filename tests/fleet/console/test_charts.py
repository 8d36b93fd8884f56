"""The charts of a rollout's gates: they show what the gates decide, and hold no styles."""

import random
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import numpy as np
import pytest
from tests.fleet.simulated_rollout import BAD_MODELS, CLEAN, simulate

from edgekit_fleet.console.charts import Chart, Line, draw_bar
from edgekit_fleet.console.rollouts.evidence import find_courses
from edgekit_fleet.console.rollouts.gate_charts import make_chart
from edgekit_fleet.rollouts.betting import find_refuted_limits, log_capital
from edgekit_fleet.rollouts.gate_table import GATES, Sample, make_limits
from edgekit_fleet.rollouts.gates import judge_samples
from edgekit_host.plots.axes import linear_ticks


def parse(drawn):
    return ElementTree.fromstring(drawn)  # noqa: S314


@pytest.mark.parametrize("name", [*BAD_MODELS, "clean"])
def test_course_stops_exactly_where_the_gates_stop_the_rollout(name):
    run = simulate(3, 400, {**BAD_MODELS, "clean": CLEAN}[name], days=3)
    samples, settings = run.progress.samples(run.log[-1][0]), run.progress.settings
    limits, models = settings.limits, sorted(settings.models)
    judgement = judge_samples(samples, limits, models)
    courses = find_courses(samples, limits, models)
    assert {course.gate for course in courses} <= set(GATES)
    assert max(course.leaning for course in courses) == pytest.approx(judgement.leaning)
    assert any(course.is_stop for course in courses) == (judgement.verdict is not None)
    for course in courses:
        if course.is_stop and judgement.verdict and course.gate.name == judgement.verdict.gate:
            assert course.where in judgement.verdict.sentence
        is_early = course.gate.name == "fault" and course.is_stop
        assert is_early or (course.lows[-1] >= course.limit) == course.is_stop


def test_refuted_limit_is_the_one_that_the_capital_refutes():
    draw = random.Random(5)
    values = [min(max(draw.gauss(0.3, 0.1), 0.0), 1.0) for _ in range(300)]
    limits = np.linspace(0.01, 0.5, 50).tolist()
    counts = (1, 7, 64, 65, 200, 300)
    found = find_refuted_limits(values, counts, limits, 4.6)
    for count, low in zip(counts, found, strict=True):
        refuted = [limit for limit in limits if log_capital(values[:count], limit) >= 4.6]
        best = max(refuted, default=0.0)
        assert best <= low <= best + 0.01 + 1e-12  # between two limits it is interpolated
    assert 0.25 < found[-1] < 0.3


def test_chart_is_well_formed_and_holds_no_styles_or_foreign_markup():
    samples = [Sample(device_class="x86-64", is_failed=number % 3 == 0) for number in range(30)]
    samples += [Sample(device_class="rpi5", is_failed=False)]
    (course, *_) = find_courses(samples, make_limits(), ["digits"])
    chart = make_chart(replace(course, where=" of class <b>&"))
    drawn = str(chart.draw())
    root = parse(drawn)
    assert root.find("title").text == "Failed installations of class <b>&"
    assert "certainly above" in root.find("desc").text
    assert "style=" not in drawn
    assert "<b>" not in drawn
    table = str(chart.write_table())
    assert table.count("<tr>") <= 13
    assert "30 %" in table or "32 %" in table


def test_chart_of_one_value_and_of_none_is_drawn():
    for points in ([(1.0, 2.0)], []):
        chart = Chart(
            key="k",
            title="t",
            words="w",
            x_name="x",
            x_ticks=[],
            top=3.0,
            lines=[Line(name="a", style="s", points=points)],
        )
        parse(str(chart.draw()))
        assert "nan" not in str(chart.draw())


def test_bar_shows_each_part_and_says_it():
    drawn = str(draw_bar([("is-succeeded", 999_999), ("is-failed", 1)], "999,999 succeeded, 1 failed"))
    root = parse(drawn)
    assert [float(part.get("width")) >= 4 for part in root] == [True, True]
    assert root.get("aria-label") == "999,999 succeeded, 1 failed"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0.9, 1.0), (1, 1.47), (0, 37_000)])
def test_ticks_are_few_round_numbers_inside(low, high):
    ticks = linear_ticks(low, high, 4)
    assert 3 <= len(ticks) <= 6
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
