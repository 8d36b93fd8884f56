"""The agent against a real fleet: its broker, its web server, its repository and its manager."""

import hashlib
import json
import os
import re
import signal
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.agent.site import Site, site, status  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations.releases import rotate_keys
from edgekit_fleet.store.tables import AuditRow

pytest.importorskip("onnxruntime")


def test_device_installs_what_the_fleet_wants_and_shows_what_is_done_by_hand(site):  # noqa: F811
    site.enrol()
    agent = site.start("agent", is_copy=False)  # whose memory is its own
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
    text = Path(f"/proc/{agent.pid}/smaps_rollup").read_text()
    (pss,) = re.findall(r"^Pss: +(\d+) kB", text, re.MULTILINE)
    print(f"agent: {int(pss) / 1024:.1f} MB PSS")


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


def test_running_agent_follows_the_exchange_of_the_managers_key(site):  # noqa: F811
    """Neither agent nor manager is started again, and the agent loads no library of TUF for it."""
    site.enrol()
    agent = site.start("agent", is_copy=False)  # which maps what it imports itself
    site.want("1.0.0")
    site.wait_status("converged", ["succeeded"])
    before = site.reported().desired_version
    rotate_keys(site.fleet.folder, site.fleet.store, ("manager",), actor="test")
    wait_for(lambda: site.reported().desired_version > before, f"the document by the new key; {site.log()}")
    assert site.status() == ("converged", ["succeeded"])
    assert agent.poll() is None
    assert "/tuf/" not in Path(f"/proc/{agent.pid}/maps").read_text()
    with site.fleet.store.transaction() as session:
        events = session.scalars(select(AuditRow.action).where(AuditRow.subject == site.name)).all()
    assert [each for each in events if "event" in each or "alarm" in each] == []
    site.want("2.0.0")
    site.wait_version("2.0.0")
