"""Samples on their whole way: an order of the fleet, a request kept on the device, the fleet opens it."""

import contextlib
import http.client
import json
import signal

import numpy as np
import pytest
from sqlalchemy import select
from tests.agent.site import site  # noqa: F401  # a fixture
from tests.fleet.conftest import fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.operations import samples
from edgekit_fleet.samples.vault import SampleVault
from edgekit_fleet.store.tables import SampleRow
from edgekit_runtime import Client
from edgekit_runtime.errors import RequestError
from edgekit_runtime.samples.folder import SampleFolder
from edgekit_runtime.system.local_sockets import connect_local

pytest.importorskip("onnxruntime")


def list_rows(site):  # noqa: F811
    with site.fleet.store.transaction() as session:
        return [(row.id, row.model, row.triggers.split()) for row in session.scalars(select(SampleRow))]


def keep(site):  # noqa: F811
    """Ask the model once and keep the request; return the sample's identifier, or None."""
    with Client(str(site.socket_path)) as client, contextlib.suppress(RequestError):  # before it is loaded
        client.infer("linear", {"x": np.full((1, 4), 7, np.float32)})
    with contextlib.closing(http.client.HTTPConnection("localhost")) as connection:
        connection.sock = connect_local(str(site.socket_path), 20.0)
        connection.request("POST", "/v2/models/linear/keep", b"")
        return json.loads(connection.getresponse().read()).get("sample")


def test_a_request_that_is_kept_here_is_opened_by_the_fleet_and_gone_here(site):  # noqa: F811
    vault = SampleVault(site.fleet.folder, site.fleet.settings)
    samples.switch(site.fleet.store, vault, is_on=True, days=30, max_bytes=1 << 30, actor="test")
    site.enrol()
    site.install("1.0.0")
    service = site.serve()
    site.start("agent")
    triggers = samples.parse_triggers("random or kept")
    request = samples.StartSamples(model="linear", selector="all", triggers=triggers)
    order = samples.start(site.fleet.store, request, actor="test")
    sample_id = wait_for(lambda: keep(site), f"the order; {site.log()}")

    wait_for(lambda: (sample_id, "linear", ["kept"]) in list_rows(site), f"the sample; {site.log()}")
    folder = SampleFolder(site.home / "state" / "fleet" / "samples")
    wait_for(lambda: folder.list_samples() == [], "the deletion here")
    sample = vault.read(sample_id)
    assert np.frombuffer(sample.input, np.float32).tolist() == [7.0] * 4
    assert sample.header.order == order.id
    wait_for(lambda: site.reported().samples[order.id].triggers.get("kept"), f"the report; {site.log()}")
    assert site.reported().samples[order.id].state == "collecting"
    assert "1 kept" in site.run("samples")

    service.send_signal(signal.SIGTERM)  # the owner forbids it, and what waits is neither sent nor left
    assert service.wait(20) == 0
    config = site.path / "service.toml"
    config.write_text("[samples]\nallow = false\n")
    folder.write("linear", (order.id, "random"), "f" * 32, b"sealed")
    assert "none is sent" in site.run("samples")
    site.start("serve", "--port", "0", "--config", str(config))
    wait_for(lambda: folder.list_samples() == [], f"the deletion; {site.log()}")
    wait_for(lambda: site.reported().samples[order.id].state == "forbidden", f"the report; {site.log()}")
    assert [row_id for row_id, _, _ in list_rows(site)] == [sample_id]
    assert "forbids" in site.run("samples")
