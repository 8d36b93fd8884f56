"""The configuration of a service that serves tails."""

from edgekit_offload.export.service_config import service_config
from edgekit_runtime.service.options.config import read_config


def test_service_of_tails_takes_uploads_of_the_slowest_links_that_plans_are_made_for(tmp_path):
    path = tmp_path / "service.toml"
    path.write_text(service_config(["model.tail"], {"port": 0}, devices=8))
    http = read_config(path).http
    assert http.min_bytes_per_s * 8 <= 20_000  # bits a second
    assert http.server_timing
    assert http.max_tls_connections == 8
