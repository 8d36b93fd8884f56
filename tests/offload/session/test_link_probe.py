"""Probes of a link to a server that is not ours, and to ours; figures are compared on emulated links."""

import json
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.free_port import free_port
from tests.offload.session import link_probe_server
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import running_linear
from tests.waiting import wait_for

from edgekit_host.emulation.testbed import Testbed
from edgekit_runtime.errors import TransportError
from edgekit_runtime.offload.measurement.link_probe import probe_link

CAN_NAMESPACES = os.geteuid() == 0 and Path("/dev/net/tun").exists() and shutil.which("tc") is not None
PROBE = """
import json, sys
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.offload.measurement.link_probe import probe_link
print(json.dumps(to_plain(probe_link(sys.argv[1], insecure=True, seconds=4.0))))
"""


@pytest.fixture
def start() -> Iterator[Callable[..., str]]:
    """Starts the other server on loopback, and returns its address."""
    made: list[ThreadingHTTPServer] = []

    def run(**attributes: object) -> str:
        handler = type("Handler", (link_probe_server.Handler,), attributes)
        made.append(ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=made[-1].serve_forever, daemon=True).start()
        return f"127.0.0.1:{made[-1].server_address[1]}"

    yield run
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.mark.skipif(not CAN_NAMESPACES, reason="network namespaces need root, /dev/net/tun and iproute2")
def test_probe_of_an_emulated_link_finds_its_rates() -> None:
    with Testbed() as testbed:
        server = testbed.spawn(
            "server", [sys.executable, link_probe_server.__file__, testbed.server_host, "9001"]
        )
        wait_for(lambda: server.output.endswith(b"\n"), "the server")
        host, port = testbed.reach(9001)
        for up, down, rtt_ms in ((20, 20, 20), (2, 10, 5)):
            testbed.set_link(up_mbit_s=up, down_mbit_s=down, rtt_ms=rtt_ms)
            client = testbed.spawn("device", [sys.executable, "-c", PROBE, f"{host}:{port}"])
            wait_for(lambda client=client: client.wait(0.1) is not None, "the probe")
            assert client.output, client.last_line
            probe = json.loads(client.output)
            # As wide as the emulator's own test; a loaded machine makes round trips longer, never shorter.
            assert probe["up_bits_per_s"] == pytest.approx(up * 1e6, rel=0.15)
            assert probe["down_bits_per_s"] == pytest.approx(down * 1e6, rel=0.15)
            assert probe["rtt_s"] >= 0.9 * rtt_ms / 1e3


def test_probe_works_with_another_server(start: Callable[..., str]) -> None:
    found = probe_link(start(), seconds=0.5)
    assert found.rtt_s > 0
    assert found.state.up_bits_per_s > 1e6


def test_probe_works_with_our_service(maker: PackageMaker, tmp_path: Path) -> None:
    secret = "abcdefgh" * 4
    (tmp_path / "token").write_text(f"{secret}\n")
    (tmp_path / "token").chmod(0o600)
    listen = {"host": "127.0.0.1", "token_file": str(tmp_path / "token")}
    with running_linear(maker, tmp_path, listen=listen) as service:
        found = probe_link(f"127.0.0.1:{service.port}", token=secret, seconds=0.5)
        with pytest.raises(TransportError, match="token"):
            probe_link(f"127.0.0.1:{service.port}", token=secret[::-1], seconds=0.5)
    assert found.sent_bytes >= 4096
    assert found.up_bits_per_s > 1e6


def test_server_that_wants_a_token_is_said(start: Callable[..., str]) -> None:
    with pytest.raises(TransportError, match="give the server's token"):
        probe_link(start(status=401), seconds=0.5)


def test_server_that_answers_before_it_reads_gives_no_bandwidth(start: Callable[..., str]) -> None:
    with pytest.raises(TransportError, match="before it had read"):
        probe_link(start(refuses_early=True), seconds=0.5)


def test_server_that_is_not_there_is_said() -> None:
    with pytest.raises(TransportError, match="cannot reach"):
        probe_link(f"127.0.0.1:{free_port()}", seconds=0.5)
