"""The fleet's streams on a device: the agent writes them, the service runs them, the fleet sees it."""

import json
import signal

import pytest
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.service.test_stream_service import write_wav
from tests.waiting import wait_for

from edgekit_fleet.operations.streams import remove_stream, set_stream
from edgekit_runtime.protocol.streams import StreamOptions

pytest.importorskip("onnxruntime")


def states(site):  # noqa: F811
    report = site.reported()
    return {} if report is None else {name: stream.state for name, stream in report.streams.items()}


def test_stream_of_the_fleet_runs_on_the_device_until_the_fleet_removes_it(site):  # noqa: F811
    site.enrol()
    site.start("agent", "--live", "https://d1.example/live")
    settings = StreamOptions(model="meter", source=str(write_wav(site.path / "s.wav", 1.2)))
    set_stream(site.fleet.store, "d1", "door", settings, actor="test")
    wait_for(lambda: states(site) == {"door": "missing"}, f"the document; {site.log()}")
    service = site.serve()
    wait_for(lambda: states(site) == {"door": "ended"}, f"the end of the sound; {site.log()}")
    assert "meter" in site.reported().streams["door"].error
    assert site.reported().facts["live"] == "https://d1.example/live"
    file = site.home / "state" / "fleet" / "streams.json"
    assert (file.stat().st_mode & 0o777, "door" in json.loads(file.read_bytes())["streams"]) == (0o600, True)
    remove_stream(site.fleet.store, "d1", "door", actor="test")
    wait_for(lambda: states(site) == {}, f"the end of the stream; {site.log()}")
    wait_for(lambda: "stream door: stopped" in site.log(), "the service to end it")
    service.send_signal(signal.SIGTERM)
    assert service.wait(20) == 0
