"""Where the service listens for gRPC: the command line, the configuration, and what they refuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.service.serve_parts import Served, environment
from tests.service.service_parts import Y

from edgekit_runtime.errors import ConfigError
from edgekit_runtime.service.options.config import read_config

BLOCKED = "import sys; sys.modules['hpack'] = None; from edgekit_runtime.cli import main; sys.exit(main())"


def test_command_listens_over_tcp_and_a_unix_socket_and_ends_in_order(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hpack = pytest.importorskip("hpack")
    from tests.service.grpc_parts import connecting, infer_message

    path = folder / "grpc.sock"
    # The process finds nothing of ours but the runtime; hpack may be elsewhere.
    monkeypatch.setattr("tests.service.serve_parts.environment", lambda home: add_path(home, hpack))
    served = Served(folder, "--grpc-port", "0", "--grpc-unix-socket", str(path))
    ready = served.wait_ready()
    assert f"grpc+unix:{path}" in ready
    assert "grpc://127.0.0.1:" in ready
    with connecting(path) as client:
        assert client.ask(infer_message()).array().tobytes() == Y
        code, _ = served.end()
    assert code == 0
    assert not path.exists()


def add_path(home: Path, package: object) -> dict[str, str]:
    variables = environment(home)
    folder = Path(str(getattr(package, "__file__", ""))).parents[1]
    return {**variables, "PYTHONPATH": os.pathsep.join((variables["PYTHONPATH"], str(folder)))}


def test_missing_package_is_named_with_the_command_that_installs_it(folder: Path) -> None:
    command = [sys.executable, "-c", BLOCKED, "serve", "--unix-socket", str(folder / "s.sock"), "--port", "0"]
    command += ["--package", str(folder / "linear.edgepkg"), "--grpc-port", "0"]
    done = subprocess.run(
        command, env=environment(folder), capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == ConfigError.exit_code
    assert "hpack" in done.stderr
    assert "[grpc]" in done.stderr


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[grpc]\nhost = '0.0.0.0'\nport = 8001", "tls_certificate"),
        ("[grpc]\nport = 99999", "65535"),
        ("[grpc]\nmax_streams = 0", "max_streams"),
        ("[grpc]\nsocket = 'x'", "socket"),
    ],
)
def test_unsafe_or_unknown_settings_are_refused(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "service.toml").write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_config(tmp_path / "service.toml")


def test_table_says_where_to_listen(tmp_path: Path) -> None:
    (tmp_path / "service.toml").write_text("[grpc]\nport = 8001\nunix_socket = '/run/grpc.sock'")
    options = read_config(tmp_path / "service.toml").grpc
    assert (options.host, options.port, options.unix_socket) == ("127.0.0.1", 8001, "/run/grpc.sock")
