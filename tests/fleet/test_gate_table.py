"""The table of gates: what offers or explains a limit is made from it, and stored rollouts still load."""

import json
import subprocess
import sys

import pytest
from tests.toolkit.cases import cases

from edgekit_fleet.rollouts.decide import decide
from edgekit_fleet.rollouts.gate_table import GATES, LIMITS, make_limits
from edgekit_fleet.rollouts.gates import list_tests
from edgekit_fleet.rollouts.progress import StartEntry, begin, entry_from_plain
from edgekit_fleet.rollouts.replay import replay
from edgekit_runtime.errors import FleetError

STORED_LIMITS = {
    "max_failed_share": 0.05,
    "max_faulty_share": 0.01,
    "max_latency_ratio": 1.3,
    "max_energy_ratio": 1.3,
    "max_extra_errors": 0.01,
    "min_agreement": 0.95,
    "max_drift": 0.25,
    "min_requests": 20,
    "alpha": 0.01,
}
"""Limits as the version before the table wrote them into the store."""

FURTHER_GATE = """
import json
import math

import edgekit_fleet.rollouts.gate_table as table
from edgekit_runtime.dataclass_json import Range

BATTERY = table.Gate(
    name="battery",
    title="Battery",
    unit="charge, below the old version's",
    limit=table.Limit("max_battery_loss", 0.2, Range(0.01, 1), "Most charge lost, share of a battery"),
    sentence="charge{model} is {mean:.0%} below the old version's {on}, expected at most {limit:.0%}",
    figure=lambda _begin, end: end.gauges.get("battery"),
    compare="difference",
    worse="lower",
    least=-0.1,
)
table.GATES = (*table.GATES, BATTERY)
table.LIMITS = (*table.LIMITS, BATTERY.limit)

from types import SimpleNamespace

from jinja2 import Environment
from click.testing import CliRunner

from edgekit_cli.fleet.rollout import command
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.api.openapi import make_document
from edgekit_fleet.console.rollouts import plan_pages
from edgekit_fleet.console.rollouts.evidence import find_courses
from edgekit_fleet.console.rollouts.gate_charts import make_chart
from edgekit_fleet.rollouts.gates import find_period, judge_samples, list_tests, measure
from edgekit_runtime.agent.documents import ModelFigures
from edgekit_runtime.agent.figures import read_figures
from edgekit_runtime.dataclass_json import from_plain

CALLS = 'edgekit_requests_total{model="m",version="%s",outcome="succeeded"} 100\\n'
PAGE = CALLS + "edgekit_battery_charge_ratio %s\\n"


def sample(charge):
    (before,), (after,) = read_figures(PAGE % (1, 0.9)), read_figures(PAGE % (2, charge))
    evidence = measure(find_period(None, before), find_period(None, after), ())
    return table.Sample(device_class="rpi5", is_failed=False, measures={("m", 0): evidence})


limits = table.make_limits()
bad, good = ([sample(charge)] * 100 for charge in (0.2, 0.85))
(chart,) = (make_chart(course) for course in find_courses(bad, limits, ["m"]) if course.gate is BATTERY)
request = from_plain(StartRollout, {"release": "r", "selector": "all", "limits": {"max_battery_loss": 0.5}})
print(json.dumps({
    "verdict": judge_samples(bad, limits, ["m"]).verdict.sentence,
    "is_good_kept": judge_samples(good, limits, ["m"]).verdict is None,
    "alpha": sum(test.alpha for test in list_tests(limits, ["m"])),
    "help": CliRunner().invoke(command, ["start", "--help"]).output,
    "schema": make_document()["components"]["schemas"]["RolloutLimits"]["properties"]["max_battery_loss"],
    "request": request.limits.max_battery_loss,
    "form": plan_pages.FIELDS["max_battery_loss"],
    "chart": chart.title + ": " + chart.words,
}))
"""


def test_further_gate_is_one_row_and_its_figure_on_the_device():
    done = subprocess.run(
        [sys.executable, "-c", FURTHER_GATE], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    sentence = "charge is 70% below the old version's on 100 devices, expected at most 20%"
    assert (result["verdict"], result["is_good_kept"]) == (sentence, True)
    assert result["alpha"] == pytest.approx(0.01)  # shared by eight gates, not seven
    assert "--max-battery-loss" in result["help"] and "Most charge lost" in result["help"]
    assert result["schema"]["anyOf"][0] == {"type": "number", "minimum": 0.01, "maximum": 1}
    assert result["schema"]["description"] == "Most charge lost, share of a battery."
    assert (result["request"], result["form"]) == (0.5, "")
    assert "Battery: Battery: after 100 devices the mean is 70 %" in result["chart"]


def test_stored_rollout_of_the_version_before_loads_with_the_tests_that_it_had():
    settings = {
        "waves": [1, 2],
        "minimum": 1,
        "limits": STORED_LIMITS,
        "models": {"m": {"classes": ["rpi5"]}},
    }
    plain = {"kind": "started", "settings": settings, "devices": ["a", "b"], "classes": ["rpi5", "rpi5"]}
    entry = entry_from_plain(json.loads(json.dumps(plain)))
    assert isinstance(entry, StartEntry) and entry.settings.limits == make_limits() == STORED_LIMITS
    first = decide(begin(entry, 0.0), 1.0)
    assert replay([(0.0, entry), (1.0, first)])[1] == []


def test_rollout_is_tested_only_on_gates_that_its_stored_limits_hold():
    limits = {name: value for name, value in STORED_LIMITS.items() if name != "max_drift"}
    tests = list_tests(limits, ["m"])
    assert {test.gate.name for test in tests} == {gate.name for gate in GATES} - {"drift"}
    assert sum(test.alpha for test in tests) == pytest.approx(0.01)  # shared by six


@cases("limit", LIMITS, ids=[limit.name for limit in LIMITS])
def test_limit_outside_its_range_is_refused_by_name(limit):
    for value in (limit.range.least / 2 - 1, limit.range.most * 2, float("nan")):
        with pytest.raises(FleetError, match=f"{limit.name} is {value}, expected"):
            make_limits({limit.name: value})


def test_unknown_limit_is_refused_with_the_known_ones():
    with pytest.raises(FleetError, match="unknown limit 'max_fun', known are max_failed_share"):
        make_limits({"max_fun": 1.0})
