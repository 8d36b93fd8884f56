"""Settings and logs of a device with a real broker, agent and service."""

import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations.device_orders import ask_for_logs, change_settings, find_log
from edgekit_runtime.agent.fleet_orders import FIXED

pytest.importorskip("onnxruntime")


def test_settings_take_effect_in_agent_and_service_and_logs_of_both_come(site, monkeypatch):  # noqa: F811
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    site.enrol()
    site.start("agent", "--cap-kbit-s", "8000")
    service = site.serve()
    settings = {"log-level": "debug", "month-mb": "50", "cap-kbit-s": "64", "power-w": "12"}
    change_settings(site.fleet.store, "d1", settings, actor="test")

    def states():
        report = site.reported()
        return {} if report is None else dict(report.settings)

    no_governor = "no model of this device has a governor, which would keep the limit"
    expected = {"cap-kbit-s": FIXED, "log-level": "", "month-mb": "", "power-w": no_governor}
    wait_for(lambda: states() == expected, f"the settings; {site.log()}")
    ask_for_logs(site.fleet.store, "d1", 500, actor="test")
    wait_for(lambda: find_log(site.fleet.store, "d1").answered_at, f"the lines; {site.log()}")
    log = find_log(site.fleet.store, "d1")
    assert (log.source, log.refusal) == ("memory", "")
    assert "service: " in log.text and "settings of the fleet: log-level=debug" in log.text
    service.terminate()
    assert service.wait(20) == 0
