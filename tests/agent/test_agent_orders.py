"""Orders of the fleet, end to end."""

import os
import subprocess
import sys
import threading

import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.attacks.attack_site import site as simulated  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_runtime.agent import agent as agent_module
from edgekit_runtime.agent.membership import Membership, read_membership

pytest.importorskip("onnxruntime")


def test_pinned_model_is_left_alone_until_it_is_unpinned(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}", 30)
    site.run("pin", "linear")
    site.want("2.0.0")
    site.wait_status("diverged", ["refused"])
    assert site.reported().executions[0].code == "pinned"
    site.run("pin", "linear", "--off")
    site.want("2.0.0")
    site.wait_status("converged", ["succeeded"])


def test_model_that_is_not_wanted_any_more_is_removed_and_another_one_stays(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.install("1.0.0", "other")
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}", 30)
    site.want_removed()
    wait_for(lambda: site.slots().models() == ("other",), f"the removal; {site.log()}", 20)
    wait_for(lambda: [one.model for one in site.reported().models] == ["other"], "the report", 20)


def test_model_of_higher_priority_is_updated_first(site):  # noqa: F811
    site.enrol()
    site.want("1.0.0", priority=1)
    site.want("1.0.0", name="urgent", priority=2)
    site.start("agent")
    found = wait_for(
        lambda: (got := site.reported()) and got.status == "converged" and got, f"both; {site.log()}", 40
    )
    assert {one.model for one in found.models} == {"linear", "urgent"}
    changed = [
        (site.home / "state" / "models" / name / "state.json").stat().st_mtime_ns
        for name in ("urgent", "linear")
    ]
    assert changed == sorted(changed)


def test_renewal_in_its_process_brings_a_new_certificate_and_the_device_comes_back(site):  # noqa: F811
    site.enrol()
    before = read_membership(site.home).enrolment
    done = subprocess.run(
        [sys.executable, "-m", "edgekit_runtime.agent.enrolment", str(site.home)],
        env={**site.variables, "EDGEKIT_PARENT": str(os.getpid())},
        check=False,
    )
    assert done.returncode == 0
    assert read_membership(site.home).enrolment.certificate != before.certificate
    site.start("agent")
    site.want("1.0.0")
    site.wait_status("converged", ["succeeded"])


def test_agent_whose_certificate_ends_soon_stops_to_renew_it(simulated, monkeypatch):  # noqa: F811
    monkeypatch.setattr(agent_module, "_RENEWAL_S", 0.0)
    assert simulated.agent.turn(1.0)
    monkeypatch.setattr(Membership, "needs_renewal", lambda *_: True)
    assert simulated.agent.run(threading.Event()) == "renew"


def test_bundle_is_not_applied_while_the_agent_runs(site):  # noqa: F811
    site.enrol()
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}", 30)
    words = site.command("fleet", "apply", str(site.path / "a.bundle"))
    done = subprocess.run(words, env=site.variables, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "does `edgekit-device agent` or `fleet apply` run? End it first" in done.stderr


def test_printed_unit_starts_the_agent_as_the_user_of_the_service(site):  # noqa: F811
    unit = site.run("agent", "--print-unit")
    lines = dict(line.partition("=")[::2] for line in unit.splitlines() if "=" in line)
    assert lines["ExecStart"].endswith("edgekit-device agent")
    assert (lines["User"], lines["Restart"], lines["NoNewPrivileges"]) == ("edgekit", "always", "yes")
    assert "fleet" in lines["ReadWritePaths"]
