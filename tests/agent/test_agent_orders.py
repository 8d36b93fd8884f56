"""Orders of the fleet, end to end."""

import os
import sys
import threading
import time

import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.attacks.attack_site import site as simulated  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.fork_server import runtime_server
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_runtime.agent.enrolment import is_renewal_due, renew
from edgekit_runtime.agent.link_watch import Renewal
from edgekit_runtime.agent.membership import read_membership

pytest.importorskip("onnxruntime")


def test_pinned_model_is_left_alone_until_it_is_unpinned(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}")
    site.run("pin", "linear")
    site.want("2.0.0")
    site.wait_status("diverged", ["refused"])
    assert site.reported().executions[0].code == "pinned"
    assert site.fleet.detail(site.name).pinned == {"linear": "1.0.0"}
    site.run("pin", "linear", "--off")
    site.want("2.0.0")
    site.wait_status("converged", ["succeeded"])
    assert site.fleet.detail(site.name).pinned == {}


def test_model_that_is_not_wanted_any_more_is_removed_and_another_one_stays(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.install("1.0.0", "other")
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}")
    site.want_removed()
    wait_for(lambda: site.slots().models() == ("other",), f"the removal; {site.log()}")
    wait_for(lambda: [one.model for one in site.reported().models] == ["other"], "the report")


def test_model_of_higher_priority_is_updated_first(site):  # noqa: F811
    site.enrol()
    site.want("1.0.0", priority=1)
    site.want("1.0.0", name="urgent", priority=2)
    site.start("agent")
    found = wait_for(
        lambda: (got := site.reported()) and got.status == "converged" and got, f"both; {site.log()}"
    )
    assert {one.model for one in found.models} == {"linear", "urgent"}
    changed = [
        (site.home / "state" / "models" / name / "state.json").stat().st_mtime_ns
        for name in ("urgent", "linear")
    ]
    assert changed == sorted(changed)


def test_certificate_is_renewed_when_it_is_time_and_the_device_comes_back(site):  # noqa: F811
    site.enrol()
    before = read_membership(site.home).enrolment
    now_s = time.time()
    assert [is_renewal_due(before, now_s + days * 86_400.0) for days in (0, 3650)] == [False, True]
    variables = {**site.variables, "EDGEKIT_PARENT": str(os.getpid())}
    words = [sys.executable, "-m", "edgekit_runtime.agent.enrolment", str(site.home)]
    # By what the fleet has signed, whatever the clock says: not yet, and in time.
    for stated, code in (("0", 3), (str(now_s + 300 * 86_400.0), 0)):
        assert runtime_server().popen([*words, stated], env=variables).wait(60) == code
    assert read_membership(site.home).enrolment.certificate != before.certificate
    before = read_membership(site.home).enrolment
    renew(site.home)
    assert read_membership(site.home).enrolment.certificate != before.certificate
    site.start("agent")
    site.want("1.0.0")
    site.wait_status("converged", ["succeeded"])


@pytest.mark.parametrize("is_due", [True, False])
def test_agent_connects_again_when_its_certificate_was_renewed(is_due, simulated, monkeypatch):  # noqa: F811
    asked, stop = [], threading.Event()

    def renew_now(is_refused, _stated_s):
        asked.append(is_refused)
        stop.set()
        return Renewal(is_new=is_due)

    simulated.agent._watch._renew = renew_now
    simulated.clock.passed_s += 200.0
    assert simulated.agent.run(stop) == ("renewed" if is_due else "stopped")
    assert asked == [False]


def test_bundle_is_not_applied_while_the_agent_runs(site):  # noqa: F811
    site.enrol()
    site.start("agent")
    wait_for(site.status, f"a report; {site.log()}")
    code, _, errors = site.call("fleet", "apply", str(site.path / "a.bundle"))
    assert code != 0
    assert "does `edgekit-device agent` or `fleet apply` run? End it first" in errors


def test_printed_unit_starts_the_agent_as_the_user_of_the_service(site):  # noqa: F811
    unit = site.run("agent", "--print-unit")
    lines = dict(line.partition("=")[::2] for line in unit.splitlines() if "=" in line)
    assert lines["ExecStart"].endswith("edgekit-device agent")
    assert (lines["User"], lines["Restart"], lines["NoNewPrivileges"]) == ("edgekit", "always", "yes")
    assert "fleet" in lines["ReadWritePaths"]
