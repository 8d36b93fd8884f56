"""A device whose packages come from elsewhere than its fleet: a bucket behind a public certificate."""

import dataclasses
import functools
import http.server
import ssl
import threading

import pytest
from tests.agent.site import Site
from tests.fleet.conftest import Fleet, fleet_settings, mosquitto  # noqa: F401  # fixtures
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.waiting import wait_for

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.releases.repository import open_repository

pytest.importorskip("onnxruntime")
pytest.importorskip("obstore", reason="obstore is not installed: edgekit[object-storage]")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments):
        self.server.paths.append(self.path)


@pytest.fixture
def cdn(tmp_path):
    """A web server on a folder, whose certificate comes from an authority that the fleet does not know."""
    public = Authority(tmp_path / "public")
    public.make_server(("127.0.0.1",))
    folder = tmp_path / "bucket"
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder))
    )
    server.paths, server.folder, server.public = [], folder, public
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*public.pair("server"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_trusted", [True, False])
def test_device_fetches_from_a_bucket_whose_public_certificate_it_trusts(
    fleet_settings,  # noqa: F811
    maker,  # noqa: F811
    cdn,
    tmp_path,
    is_trusted,
):
    folder, settings = fleet_settings
    settings = dataclasses.replace(
        settings,
        artifacts_storage=f"file://{cdn.folder}",
        artifacts_url=f"https://127.0.0.1:{cdn.server_address[1]}",
    )
    with Fleet(folder, settings).up() as fleet:
        site = Site(fleet, maker, tmp_path)
        site.repository = open_repository(folder)
        if is_trusted:
            site.variables["SSL_CERT_FILE"] = str(cdn.public.certificate_path)
        try:
            site.enrol()
            site.start("agent")
            site.want("1.0.0")
            if is_trusted:
                site.wait_status("converged", ["succeeded"])
                assert any(path.startswith("/targets/x86-64/") for path in cdn.paths)
            else:
                wait_for(lambda: "CERTIFICATE_VERIFY_FAILED" in site.run("fleet", "status"), site.log())
                assert cdn.paths == []
        finally:
            site.end()
