"""The agent follows what the service finds of a version: its confirmation, its trial, its verdict."""

import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

pytest.importorskip("onnxruntime")


def test_device_follows_the_trial_of_the_service(site):  # noqa: F811
    site.enrol()
    site.serve()
    site.start("agent")
    site.want("1.0.0")
    site.wait_status("converged", ["succeeded"])  # the service confirms it after 10 s
    site.want("2.0.0", trial="shadow")
    site.wait_status("working", ["trying"])
    (execution,) = site.reported().executions
    wait_for(lambda: "shadow with" in site.reported().executions[0].reason, f"the trial {execution}")
    site.slots().reject("linear", "2.0.0", "latency: twice").package.close()
    wait_for(lambda: site.reported().status == "diverged", "the verdict")
    assert site.reported().executions[0].state == "failed"
