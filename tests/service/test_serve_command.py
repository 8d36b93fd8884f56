"""`edgekit-device serve` as a process: starting, refusing, TLS and tokens, ending without losing requests."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.fork_server import runtime_server
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.serve_parts import TOKEN, Served, environment, served
from tests.service.service_parts import (
    Replies,
    X,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    running,
    running_linear,
)
from tests.waiting import bounded, wait_for

from edgekit_runtime import Client
from edgekit_runtime.cli import main
from edgekit_runtime.errors import ConfigError, PackageError, RequestError, TransportError
from edgekit_runtime.service.http.listeners import listen_unix
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import Listen, ServiceConfig, read_config
from edgekit_runtime.service.options.model import Isolation, ModelOptions
from edgekit_runtime.system.child_process import child_environment


def test_process_serves_and_tells_its_metrics_until_sigterm_and_leaves_no_socket(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(folder) as service:
        with Client(str(service.socket_path)) as client:
            assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)
        assert main(["metrics", "--socket", str(service.socket_path)]) == 0
        counted = 'edgekit_requests_total{model="linear",version="1.0.0",outcome="succeeded"} 1'
        assert counted in capsys.readouterr().out
        code, printed = service.end()
        assert (code, printed.strip()) == (0, "stopped")
        assert not service.socket_path.exists()
    assert main(["metrics", "--socket", str(service.socket_path)]) == TransportError.exit_code


def test_log_in_json_has_no_other_lines(folder: Path) -> None:
    (folder / "service.toml").write_text("[log]\njson = true\n")
    service = Served(folder, "--config", str(folder / "service.toml"))
    with bounded(service.process):
        ready = json.loads(service.wait_ready())
        assert (ready["level"], ready["message"].startswith("ready at ")) == ("info", True)
        service.process.terminate()
        assert service.process.stderr is not None
        for line in service.process.stderr:
            json.loads(line)


def test_service_without_standard_descriptors_serves_an_isolated_model(folder: Path) -> None:
    command = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--isolate", "linear", "--port", "0"]
    command += ["--package", str(folder / "linear.edgepkg"), "--unix-socket", str(folder / "serve.sock")]
    environment = {**child_environment(), "EDGEKIT_HOME": str(folder)}
    closing = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    started = subprocess.Popen([*closing, *command], env=environment, cwd=folder)
    with bounded(started), Client(str(folder / "serve.sock")) as client:

        def is_ready() -> bool:
            with contextlib.suppress(TransportError):  # there is no socket yet, or nobody listens to it yet
                return client.ready()
            return False

        wait_for(is_ready, "the service")
        assert np.array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)


def test_package_that_is_not_there_beside_one_that_is_ends_the_start(folder: Path) -> None:
    process = Served(folder, "--package", str(folder / "gone.edgepkg"))
    code, printed = process.end_by_itself()
    assert (code, "gone.edgepkg" in printed) == (PackageError.exit_code, True), printed
    assert "ready" not in printed
    assert not process.socket_path.exists()


def test_sigterm_in_the_middle_of_a_request_lets_it_end(folder: Path) -> None:
    data = infer_bytes(np.ones((50_000, 4), np.float32))
    with served(folder) as service, service.connect() as client:
        client.sendall(data[:-1])  # more than a socket holds: the service reads it

        def is_refused() -> bool:
            try:
                with service.connect() as late:
                    late.sendall(get_bytes("/v2"))
                    return late.recv(1) == b""
            except (ConnectionError, FileNotFoundError):
                return True

        service.process.send_signal(signal.SIGTERM)
        wait_for(is_refused, "the end of listening")
        client.sendall(data[-1:])
        replies = Replies(client)
        reply = replies.next()
        assert (reply.status, reply.fields["connection"]) == (200, "close")
        assert replies.is_closed()
        assert service.process.wait(20) == 0


def test_sockets_of_systemd_are_taken(folder: Path) -> None:
    path = folder / "systemd.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def become_child() -> None:
            os.dup2(listener.fileno(), 3)
            os.environ["LISTEN_PID"] = str(os.getpid())

        # LISTEN_PID must be the child's own, which only a shell can know before Python starts.
        script = 'export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
        service = Served.__new__(Served)
        service.process = subprocess.Popen(
            ["sh", "-c", script, "sh", sys.executable, "-m", "edgekit_runtime.cli", "serve",
             "--package", str(folder / "linear.edgepkg"), "--port", "0"],
            env=environment(folder),
            preexec_fn=become_child,  # noqa: PLW1509  # no thread runs here that holds a lock
            pass_fds=[3] if listener.fileno() == 3 else [],
            close_fds=False,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )  # fmt: skip
        with bounded(service.process), Client(str(path)) as client:
            assert str(path) in service.wait_ready()
            assert client.ready("linear")
    assert path.exists()  # it is systemd's


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[listen]\nhost = '0.0.0.0'\n", "tls_certificate and token_file"),
        ("[listen]\nhost = '192.168.1.1'\ntoken_file = 'x'\n", "tls_certificate"),
        ("[listen]\nhost = ''\nunix_socket = ''\n", "nobody"),
        ("[listen]\nport = 70000\n", "port"),
        ("[listen]\nport = 'http'\n", "whole number"),
        ("[listen]\nport = true\n", "whole number"),
        ("[listen]\ntls_key = 'k'\n", "tls_certificate"),
        ("[http]\nmax_body_bytes = 0\n", "max_body_bytes"),
        ("[http]\nmax_body_byte = 1\n", "max_body_byte"),
        ("[htpp]\n", "htpp"),
        ("http = 3\n", "table"),
        ("models.a.swap = 'never'\n", "swap"),
        ("models.a.specific = '1.0'\n", "specific"),
        ("models.a.specific = [1]\n", "specific"),
        ("models.a.latest = 0\n", "latest"),
        ("models.a.what = 1\n", "what"),
        ("models.a.scheduling.max_batch = 0\n", "max_batch"),
        ("not toml", "="),
        ("a = '\xff'", "unknown tables"),
    ],
)
def test_configuration_that_is_wrong_or_unsafe_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "service.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_configuration_is_read(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text(
        "[listen]\nunix_socket = '/tmp/x.sock'\nport = 9000\n[http]\nidle_timeout_s = 3\n"
        "[shared_memory]\nallows_posix = true\n[inference]\nmax_json_bytes = 5\n"
        "[models.a]\nspecific = ['1.0']\nswap = 'resource'\nthreads = 2\ninstances = 3\n"
        "scheduling.max_batch = 4\n"
        "[models.b]\nisolated = true\n[models.b.isolation]\nprocesses = 2\nstandby = true\n"
    )
    config = read_config(path)
    assert (config.listen.port, config.http.idle_timeout_s) == (9000, 3)
    assert config.shared_memory.allows_posix
    model = config.models["a"]
    assert (model.latest, model.specific, model.swap) == (1, ("1.0",), "resource")
    assert (model.threads, model.instances, model.scheduling.max_batch) == (2, 3, 4)
    assert config.models["b"].isolation == Isolation(processes=2, standby=True)


def test_documented_defaults_are_the_defaults(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "reference" / "service.md"
    stated = page.read_text().split("```toml\n")[1].split("```")[0]
    (tmp_path / "service.toml").write_text(stated)
    config = read_config(tmp_path / "service.toml")
    assert config == ServiceConfig(models={"kws": ModelOptions()})


def test_configuration_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml"):
        read_config(tmp_path / "nothing.toml")


def test_file_in_the_place_of_the_socket_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "s.sock"
    path.write_text("precious")
    with pytest.raises(TransportError, match="no socket"):
        listen_unix(path)
    assert path.read_text() == "precious"


def test_token_is_asked_for_over_tcp_and_not_over_the_socket(
    maker: PackageMaker, tmp_path: Path, token_file: Path
) -> None:
    with running_linear(maker, tmp_path, listen={"token_file": str(token_file)}) as service:
        assert ask(service, infer_bytes(X)).status == 200
        address = f"127.0.0.1:{service.port}"
        with Client(address, token=TOKEN) as client:
            assert client.ready("linear")
        for token in (None, TOKEN[:-1], TOKEN + "0", TOKEN[:-1] + "0"):
            with Client(address, token=token) as client, pytest.raises(RequestError) as caught:
                client.metadata()
            assert caught.value.status == 401
        with service.connect_tcp() as peer:
            peer.sendall(get_bytes("/v2", fields="Authorization: Bearer é\r\n"))
            reply = Replies(peer).next()
            assert (reply.status, reply.fields["www-authenticate"]) == (401, "Bearer")


def test_scheme_of_the_token_is_taken_in_any_case(
    maker: PackageMaker, tmp_path: Path, token_file: Path
) -> None:
    config = make_config(tmp_path, listen={"token_file": str(token_file)})
    with running(config, PackageFiles([], maker.trust)) as service:
        for stated, status in (
            *((f"bearer {TOKEN}", 200), (f"BEARER  {TOKEN}", 200)),
            *((f"Basic {TOKEN}", 401), (TOKEN, 401), (f"Bearer{TOKEN}", 401), ("Bearer", 401), ("", 401)),
        ):
            with service.connect_tcp() as peer:
                peer.sendall(get_bytes("/v2", fields=f"Authorization: {stated}\r\n"))
                assert (stated, Replies(peer).next().status) == (stated, status)


@pytest.mark.parametrize(("text", "mode"), [("short", 0o600), (TOKEN, 0o644), ("a b" * 10, 0o600)])
def test_token_that_protects_nothing_is_refused(tmp_path: Path, text: str, mode: int) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    config = make_config(tmp_path, listen={"token_file": str(path)})
    with pytest.raises(ConfigError, match="token_file"), running(config, PackageFiles([], None)):  # type: ignore[arg-type]
        pass


def test_tls_with_a_token_serves_large_tensors_and_refuses_plain_text(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    listen = {
        "host": "127.0.0.1",
        "tls_certificate": str(certificate[0]),
        "tls_key": str(certificate[1]),
        "token_file": str(token_file),
    }
    with running_linear(maker, tmp_path, listen=listen) as service:
        address = f"https://127.0.0.1:{service.port}"
        with Client(address, token=TOKEN, ca_file=str(certificate[0])) as client:
            for rows in (1, 200_000, 1):
                x = np.ones((rows, 4), np.float32)
                assert np.array_equal(client.infer("linear", {"x": x})["y"], x @ WEIGHT)
        with Client(address, ca_file=str(certificate[0])) as client, pytest.raises(RequestError):
            client.metadata()
        with (
            Client(address, token=TOKEN) as client,
            pytest.raises(TransportError),
        ):  # not of a known authority
            client.metadata()
        with service.connect_tcp() as plain:
            plain.sendall(get_bytes("/v2"))
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(100).startswith(b"HTTP")
        assert ask(service, get_bytes("/v2")).status == 200


def test_certificate_that_does_not_fit_is_refused(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    listen = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[0])}
    with (
        pytest.raises(ConfigError, match="tls_certificate"),
        running(make_config(tmp_path, listen=listen), PackageFiles([], None)),  # type: ignore[arg-type]
    ):
        pass


def test_listening_beyond_this_machine_with_tls_and_token_is_allowed() -> None:
    listen = Listen(host="0.0.0.0", tls_certificate="c", tls_key="k", token_file="t")  # noqa: S104, S106
    assert ServiceConfig(listen=listen).listen.host == "0.0.0.0"  # noqa: S104


@pytest.mark.parametrize("installed", [True, pytest.param(False, marks=pytest.mark.long)])
def test_service_without_a_model_says_what_comes_next(folder: Path, installed: bool) -> None:
    place = folder / "packages"
    place.mkdir()
    stated = ["--port", "0", "--unix-socket", str(folder / "s.sock")]
    stated += [] if installed else ["--package", str(place)]
    advice = "edgekit-device install PACKAGE" if installed else f"put packages into {place} and start again"
    started = runtime_server().popen(
        [sys.executable, "-m", "edgekit_runtime.cli", "serve", *stated],
        env=environment(folder),
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )
    with bounded(started):
        assert started.stderr is not None
        assert any(f"no model to serve; next: {advice}" in line for line in started.stderr)
