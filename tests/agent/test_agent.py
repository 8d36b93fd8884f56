"""The agent against a real fleet: its broker, its web server, its repository and its manager."""

import hashlib
import json
import os
import signal

import pytest
from tests.agent.site import Site, site, status  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

pytest.importorskip("onnxruntime")


def test_device_installs_what_the_fleet_wants_and_shows_what_is_done_by_hand(site):  # noqa: F811
    site.enrol()
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}")
    site.want("1.0.0")
    site.wait_status("converged", ["succeeded"])
    site.want("2.0.0")
    site.wait_version("2.0.0")
    shown = json.loads(site.run("fleet", "status", "--json"))
    assert [(one["version"], one["state"]) for one in shown["executions"]] == [("2.0.0", "succeeded")]
    assert "d1, target x86-64" in site.run("fleet", "status")
    site.slots().rollback("linear")
    wait_for(lambda: site.reported().status == "diverged", "the rollback to show")
    assert "rolled back by hand" in site.reported().because


def test_package_that_cannot_run_here_is_refused_before_its_download(site):  # noqa: F811
    site.enrol()
    site.start("agent")
    for version, custom, changes, code in (
        ("1.0.0", {}, {"sha256": hashlib.sha256(b"").hexdigest()}, "not-offered"),
        ("2.0.0", {"engines": ["tensorrt", "no-such-engine"]}, {}, "engine"),
        ("3.0.0", {"engines": ["ort"], "memory_bytes": 1 << 50}, {}, "memory"),
    ):
        site.want(version, custom=custom, **changes)
        wait_for(lambda: read_code(site) == code, f"{code}; {site.log()}")  # noqa: B023  # called here alone
        assert site.status() == ("diverged", ["refused"])
        assert site.reported().executions[0].done_bytes == 0
    assert int(site.reported().facts["memory_bytes"]) > 1 << 28
    assert "ort" in site.reported().facts["engines"].split(",")


def read_code(site):  # noqa: F811
    """Return the code of the execution that the device reports, or None."""
    report = site.reported()
    return report.executions[0].code if report and report.executions else None


@pytest.mark.long
def test_agent_that_is_killed_goes_on_where_it_was(site):  # noqa: F811
    site.enrol()
    agent = site.start("agent")
    wait_for(site.status, "a report")
    os.kill(agent.pid, signal.SIGKILL)
    agent.wait()
    site.want("1.0.0")
    site.start("agent")
    site.wait_status("converged", ["succeeded"])
