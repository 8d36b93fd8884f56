"""What `doctor` finds on mosquitto as edgekit configures it, and on one that lets everything through."""

import socket
import time

import pytest
from tests.free_port import free_port

from edgekit_fleet.operations.doctor import probe_broker, probe_own
from edgekit_runtime.errors import ConfigError, TransportError
from edgekit_runtime.system.child_process import ChildProcess


def test_own_broker_isolates_devices_and_keeps_its_promises(mosquitto):
    found = {each.check: each for each in probe_own()}
    assert [each.text for each in found.values() if not each.works] == []
    assert "isolation of reading" in found


def test_open_broker_is_refused_for_what_devices_can_read(mosquitto, tmp_path):
    port = free_port()
    path = tmp_path / "open.conf"
    path.write_text(
        f"listener {port} 127.0.0.1\nallow_anonymous true\nretain_available false\nlog_type none\n"
    )
    with ChildProcess("edgekit_fleet.broker.mosquitto_child", str(path)):
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        found = {each.check: each for each in probe_broker(None, (("127.0.0.1", port),))}
    assert found["isolation of reading"].effect == "refused"
    assert found["isolation of writing"].effect == "adapted"
    assert found["identity"].effect == "adapted"
    assert found["retained messages"].effect == "adapted"
    assert found["last will"].works


def test_broker_that_is_not_there_is_explained():
    with pytest.raises(TransportError, match="cannot connect"):
        probe_broker(None, (("127.0.0.1", free_port()),))


def test_broker_elsewhere_is_not_probed_without_tls():
    with pytest.raises(ConfigError, match="without TLS"):
        probe_broker(None, (("192.0.2.1", 1883),))
