"""The agent and a real service: orders of loading, trials over a restart, figures."""

import signal

import numpy as np
import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_runtime.client.client import Client
from edgekit_runtime.client.control import load_installed
from edgekit_runtime.errors import SlotError

pytest.importorskip("onnxruntime")


def versions(site):  # noqa: F811
    return [version for version, state, _ in site.served() if state == "READY"]


def test_old_version_goes_first_and_an_unsafe_one_before_there_is_another(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.serve()
    site.start("agent")
    wait_for(lambda: versions(site) == ["1.0.0"], f"1.0.0; {site.log()}")
    site.want("2.0.0", order="old-first", trial="shadow")  # no trial: there is no room for two
    wait_for(lambda: versions(site) == ["2.0.0"], f"2.0.0; {site.log()}")
    assert 'edgekit_swaps_total{model="linear",outcome="unloaded"} 1' in site.metrics()
    site.want("3.0.0", order="unloaded", not_before_s=3600.0)
    wait_for(lambda: site.served() == [], f"the unsafe version to go; {site.log()}")
    site.want("3.0.0", order="unloaded")
    wait_for(lambda: versions(site) == ["3.0.0"], f"3.0.0; {site.log()}")


@pytest.mark.long
def test_trial_goes_on_after_a_restart_of_the_service(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    service = site.serve()
    site.start("agent")
    with pytest.raises(SlotError, match="expected one of"):
        load_installed(site.socket_path, "linear", "blue-green")
    site.want("2.0.0", trial="shadow")
    wait_for(lambda: "shadow with" in str(site.served()), f"a trial; {site.log()}")
    site.wait_status("working", ["trying"])
    wait_for(lambda: site.reported().executions[0].code == "trial", "the agent to see it")
    service.send_signal(signal.SIGTERM)
    service.wait(20)
    site.serve()
    wait_for(lambda: "shadow with" in str(site.served()), f"the trial again; {site.log()}")
    assert {version for version, _, _ in site.served()} == {"1.0.0", "2.0.0"}
    site.wait_status("working", ["trying"])


def test_infinity_outside_a_trial_shows_in_the_fleet(site):  # noqa: F811
    site.enrol()
    site.install("1.0.0")
    site.serve()
    wait_for(lambda: versions(site) == ["1.0.0"], f"1.0.0; {site.log()}")
    with Client(str(site.socket_path)) as client:
        for _ in range(50):  # the drift statistics look at some of them
            (answer,) = client.infer("linear", {"x": np.full((1, 4), 3e38, np.float32)}).values()
            assert np.isinf(answer).all()
    site.start("agent")
    wait_for(lambda: site.fleet.detail("d1").summary.status == "faulty", f"its fault; {site.log()}")
    detail = site.fleet.detail("d1")
    assert "but 1.0.0 answered NaN or infinity" in detail.why
    assert detail.reported["models"][0]["health"] == "faulty"
