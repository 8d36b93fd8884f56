"""Fields and addresses of the console that take a number or a time: one clear sentence each, never a 500."""

import re

import pytest
from tests.fleet.console.rollout_sample import add_rollout
from tests.fleet.simulated_rollout import CLEAN
from tests.toolkit.cases import cases

from edgekit_fleet.rollouts.gate_table import LIMITS

HOSTILE = ("nan", "-nan", "inf", "-inf", "1e308", "1e999", "-0", "", " ", "9" * 400, "1_0", "٣")
NUMBERS = ("minimum", "soak_min", *(limit.name for limit in LIMITS))
PLAN = {"release": "2026-11-16.1", "selector": "site=lyon"}


def list_problems(text):
    main = text.partition("<main")[2]
    parts = re.findall(r'class="problem".*?</p>', main, re.DOTALL)
    return [re.sub(r"<[^>]*>", "", part).strip() for part in parts]


@cases("name", NUMBERS)
def test_number_of_a_plan_that_is_none_is_refused_by_its_name(client, served, name, is_long):
    for value in HOSTILE if is_long or name == NUMBERS[0] else HOSTILE[::3]:
        query = "&".join(f"{key}={part}" for key, part in {**PLAN, name: value}.items())
        answer = client.get(f"/rollouts/new?{query}".replace(" ", "%20").replace("=٣", "=%D9%A3"))
        assert answer.status < 500, (name, value)
        if value.strip() and value not in ("-0", "1_0", "٣"):
            assert len(list_problems(answer.text)) == 1, (name, value, list_problems(answer.text))
        started = client.post("/rollouts", **{**PLAN, name: value, "name": "hostile"})
        assert started.status < 500, (name, value)
        if "nan" in value or "inf" in value:
            assert started.status == 422, (name, value)


@cases("window", ["01:00-01:00", "24:00-01:00", "nan-nan", "01:00-inf", "-0:00-01:00"])
def test_window_that_never_opens_is_refused(client, window):
    started = client.post("/rollouts", **PLAN, window=window, name="hostile")
    assert (started.status, "is not of the form 01:00-04:00" in started.text) == (422, True)
    kept = client.post("/settings/windows", name="w", window=window)
    assert kept.status == 422


@pytest.fixture
def rollout(served):
    add_rollout(served.store, "r", CLEAN, devices=20, at=1.7e9, days=0.01)


@cases("path", ["/rollouts?before=", "/releases?before=", "/audit?before=", "/devices?after="])
def test_number_in_an_address_that_is_none_ends_in_no_traceback(client, rollout, path):
    for value in HOSTILE:
        answer = client.get((path + value).replace(" ", "%20").replace("٣", "%D9%A3"))
        assert answer.status < 500, (path, value)
