"""The server's half of a package on other servers: Triton, HAProxy and Kubernetes, and what is refused."""

import collections
import contextlib
import http.client
import http.server
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tests.offload.export_parts import (
    Exported,
    cached_environment,
    free_port,
    make_package,
    process,
    run,
    wait_ready,
)
from tests.offload.session.offload_parts import set_server
from tests.service.serve_parts import TOKEN, environment, write_certificate

from edgekit_cli.offload import command as offload
from edgekit_offload.export.haproxy import write_haproxy
from edgekit_offload.export.kubernetes import object_name
from edgekit_offload.export.tails import Tail
from edgekit_offload.export.triton import Accelerator, configuration, write_repository
from edgekit_runtime.client import Client
from edgekit_runtime.client.link import Address
from edgekit_runtime.errors import ConfigError, CutError, EdgekitError
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.tensors import TensorSpec
from edgekit_runtime.trust.trust_store import TrustStore

# onnxruntime differs by rounding between machines and numbers of rows.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_package(tmp_path_factory.mktemp("export"))


def export(package: Exported, folder: Path, form: str, *options: str) -> Path:
    arguments = ["export", str(package.path), "--format", form, "--output", str(folder), *options]
    result = CliRunner().invoke(offload, [*arguments, "--keys", str(package.path.parent / "keys"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["models"] == [package.tail]
    return folder


def make_tail(shape: tuple[int | str, ...], *, is_batched: bool = True, decode: str = "") -> Tail:
    spec = TensorSpec("x", "uint8", shape)
    output = TensorSpec("y", "float16", ("N", 3))
    return Tail(
        name="m.tail.0",
        inputs=(spec,),
        outputs=(output,),
        decode={"x": decode} if decode else {},
        model=onnx.ModelProto(),
        is_batched=is_batched,
    )


def test_repository_holds_the_tail_with_its_weights(package: Exported, tmp_path: Path) -> None:
    folder = export(package, tmp_path / "repository", "triton") / package.tail
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["config.pbtxt", "model.onnx"]
    answer = run(onnx.load(folder / "1/model.onnx"), package.sent)
    np.testing.assert_array_equal(answer["logits"], package.expected["logits"])
    text = (folder / "config.pbtxt").read_text()
    assert f'name: "{package.tail}"' in text
    assert "max_batch_size: 16" in text
    assert "dynamic_batching" in text


@pytest.mark.parametrize(
    ("tail", "parts"),
    [
        (make_tail(("N", 4, "T")), ["max_batch_size: 16", "TYPE_UINT8 dims: [4, -1]", "TYPE_FP16 dims: [3]"]),
        (
            make_tail((1, 4), is_batched=False),
            ["max_batch_size: 0", "TYPE_UINT8 dims: [1, 4]", "dims: [-1, 3]"],
        ),
        (
            make_tail(("N", 8, 8, 3), is_batched=False, decode="jpeg"),
            ["TYPE_UINT8 dims: [-1]", r'"{\"x\": \"jpeg\"}"'],
        ),
    ],
)
def test_configuration_states_shapes_with_and_without_a_batch(tail: Tail, parts: list[str]) -> None:
    text = configuration(tail, "python")
    assert all(part in text for part in parts), text
    assert ("dynamic_batching" in text) == tail.is_batched


@pytest.mark.parametrize(("option", "accelerator"), [("--gpu", ""), ("--tensorrt", '"tensorrt"')])
def test_export_for_a_gpu_states_it_for_triton_and_kubernetes(
    package: Exported, tmp_path: Path, option: str, accelerator: str
) -> None:
    folder = export(package, tmp_path / "kserve", "kserve", option)
    text = (folder / "repository" / package.tail / "config.pbtxt").read_text()
    assert "kind: KIND_GPU" in text
    assert ("gpu_execution_accelerator" in text) == bool(accelerator)
    assert accelerator in text
    deployment = read_documents(folder / "kubernetes.yaml")[1]
    runtime = read_documents(folder / "kserve.yaml")[0]
    for containers in (deployment["spec"]["template"]["spec"]["containers"], runtime["spec"]["containers"]):
        assert containers[0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_export_without_a_gpu_asks_for_none(package: Exported, tmp_path: Path) -> None:
    folder = export(package, tmp_path / "kserve", "kserve")
    assert "KIND_CPU" in (folder / "repository" / package.tail / "config.pbtxt").read_text()
    assert not any("nvidia" in path.read_text() for path in folder.glob("*.yaml"))


def test_python_backend_on_a_gpu_needs_the_wheel_for_it_and_has_no_tensorrt(tmp_path: Path) -> None:
    tail = make_tail(("N", 4))
    write_repository((tail,), tmp_path / "gpu", "python", Accelerator(is_gpu=True))
    assert "onnxruntime-gpu" in (tmp_path / "gpu/requirements.txt").read_text()
    with pytest.raises(CutError, match="leave out --backend python"):
        write_repository(
            (tail,), tmp_path / "repository", "python", Accelerator(is_gpu=True, has_tensorrt=True)
        )
    assert not (tmp_path / "repository").exists()


def test_gpu_is_refused_for_haproxy(package: Exported, tmp_path: Path) -> None:
    arguments = ["export", str(package.path), "--format", "haproxy", "--output", str(tmp_path), "--gpu"]
    result = CliRunner().invoke(offload, arguments)
    assert result.exit_code == 2
    assert "HAProxy runs no model" in result.output


def test_photographs_need_the_python_backend(tmp_path: Path) -> None:
    tail = make_tail(("N", 8, 8, 3), is_batched=False, decode="jpeg")
    with pytest.raises(CutError, match="--backend python"):
        write_repository((tail,), tmp_path / "repository", "onnxruntime")
    assert not (tmp_path / "repository").exists()


def test_replica_that_is_no_address_is_refused(tmp_path: Path) -> None:
    for replica in ("host", "ftp://host:1", "host:99999", "http://host:1/path", "h check:1", "${H}:1"):
        with pytest.raises(CutError, match="replica"):
            write_haproxy((make_tail(("N", 4)),), tmp_path, (replica,), insecure=True)
    with pytest.raises(CutError, match="no replicas"):
        write_haproxy((make_tail(("N", 4)),), tmp_path, ())


def test_replica_on_another_machine_needs_tls(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain HTTP to another machine"):
        write_haproxy((make_tail(("N", 4)),), tmp_path, ("box:8000",))
    write_haproxy((make_tail(("N", 4)),), tmp_path, ("https://box:8000",))


def test_names_of_kubernetes_objects_are_valid() -> None:
    assert object_name("Key_Words.v2") == "key-words-v2"
    assert object_name("3d") == "model-3d"
    assert len(object_name("a" * 99)) == 40


TRITON = "nvidia-pytriton==0.7.0"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, package: Exported) -> Iterator[int]:
    """The port of the real Triton, 2.51 as in the wheel, with the repository that was exported."""
    made = os.environ.get("EDGEKIT_TRITON") == "1"
    found = cached_environment(
        "triton",
        TRITON,
        "numpy==1.26.4",
        "onnxruntime",
        "flatbuffers",
        "packaging",
        "protobuf",
        may_make=made,
    )
    if found is None:
        pytest.skip("no Triton in the cache; EDGEKIT_TRITON=1 installs it by pip (330 MB with onnxruntime)")
    folder = tmp_path_factory.mktemp("triton")
    site = next(found.glob("lib/python*/site-packages"))
    home, version = site / "pytriton/tritonserver", f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = shutil.copytree(home / "backends/python", folder / "backends/python")
    stub = home.parent / f"tritonserver/python_backend_stubs/{version}/triton_python_backend_stub"
    if not stub.exists():
        pytest.skip(f"the wheel has no Triton backend for Python {version}")
    shutil.copy(stub, backend)
    repository = export(package, folder / "repository", "triton", "--backend", "python")
    libraries = [
        home / "lib",
        home / "external_libs",
        site / "nvidia_pytriton.libs",
        sysconfig.get_config_var("LIBDIR"),
    ]
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": f"{found / 'bin'}{os.pathsep}{os.environ['PATH']}",  # its Python ignores PYTHONPATH
    }
    port, log = free_port(), folder / "log"
    argv = [
        *(str(home / "bin/tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={folder / 'backends'}", "--http-address=127.0.0.1", f"--http-port={port}"),
        *("--allow-grpc=false", "--allow-metrics=false", "--exit-timeout-secs=2"),
    ]
    with process(argv, log, env) as child:
        wait_ready(child, port, log)
        yield port


def test_real_triton_answers_our_client_as_the_tail_does_here(triton: int, package: Exported) -> None:
    with Client(f"127.0.0.1:{triton}") as client:
        assert client.ready(package.tail)
        for rows in (1, 8):
            sent = {name: array[:rows] for name, array in package.sent.items()}
            answer = client.infer(package.tail, sent)
            np.testing.assert_allclose(answer["logits"], package.expected["logits"][:rows], **CLOSE)


@pytest.mark.parametrize("plan", ["cut1", "cut1-zstd"])
def test_session_on_a_device_splits_with_a_real_triton(
    triton: int, package: Exported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str
) -> None:
    """Triton answers the golden inputs rightly; it reads no zstd, so the device sends plain bodies."""
    set_server(tmp_path, monkeypatch, f"127.0.0.1:{triton}", plan=plan)
    trust = TrustStore.from_folder(package.path.parent / "keys")
    with contextlib.closing(open_session(package.path, trust=trust)) as session:
        assert isinstance(session, RemoteSession)
        assert session.wait_for_probe(30)
        decision = session.decision()
        assert (decision.plan.name, decision.plan.compression) == (plan, "identity"), decision.reason
        for row in range(8):
            answer = session.run({"image": package.images[row : row + 1]})["logits"]
            np.testing.assert_allclose(answer, package.expected["logits"][row : row + 1], **CLOSE)
        assert (session.counts.remote, session.counts.local, session.counts.failed) == (8, 0, 0)


def test_real_triton_joins_requests_of_several_devices(triton: int, package: Exported) -> None:
    wrong: list[str] = []

    def ask(row: int) -> None:
        sent = {name: array[row : row + 1] for name, array in package.sent.items()}
        with Client(f"127.0.0.1:{triton}") as client:
            for _ in range(30):
                answer = client.infer(package.tail, sent)["logits"]
                if not np.allclose(answer, package.expected["logits"][row : row + 1], **CLOSE):
                    wrong.append(f"row {row}")

    threads = [threading.Thread(target=ask, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_real_triton_refuses_another_version_of_the_tail(triton: int, package: Exported) -> None:
    with Client(f"127.0.0.1:{triton}") as client, pytest.raises(EdgekitError):
        client.infer(package.tail[:-1] + "x", package.sent)


@pytest.fixture(scope="module")
def haproxy() -> str:
    found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None and os.getuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "install", "-y", "-qq", "haproxy"], check=False, capture_output=True)
        found = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")
    if found is None:
        pytest.skip("haproxy is not installed, and apt-get cannot install it here")
    return found


def test_replicas_that_are_killed_and_ended_lose_no_request(
    haproxy: str, package: Exported, tmp_path: Path
) -> None:
    """Of three replicas one gets SIGKILL and one SIGTERM while four devices ask without a pause."""
    ports = [free_port() for _ in range(3)]
    replicas = [option for port in ports for option in ("--replica", f"127.0.0.1:{port}")]
    config = export(package, tmp_path / "haproxy", "haproxy", *replicas) / "haproxy.cfg"
    front = free_port()
    config.write_text(config.read_text().replace("127.0.0.1:8090", f"127.0.0.1:{front}"))
    subprocess.run([haproxy, "-c", "-f", config], check=True, capture_output=True)
    counts: collections.Counter[str] = collections.Counter()
    stop = threading.Event()

    def ask(row: int) -> None:
        sent = {name: array[row : row + 1] for name, array in package.sent.items()}
        with Client(f"127.0.0.1:{front}", timeout_s=20) as client:
            while not stop.is_set():
                try:
                    answer = client.infer(package.tail, sent)["logits"]
                except EdgekitError as error:
                    counts[f"lost: {error}"] += 1
                    continue
                is_right = np.allclose(answer, package.expected["logits"][row : row + 1], **CLOSE)
                counts["right" if is_right else "wrong"] += 1

    def wait_for_answers(number: int) -> None:
        end, wanted = time.monotonic() + 30, counts["right"] + number
        while counts["right"] < wanted and time.monotonic() < end:
            time.sleep(0.02)
        assert counts["right"] >= wanted, counts

    with contextlib.ExitStack() as stack:
        children = []
        for number, port in enumerate(ports):
            home = tmp_path / f"home{number}"
            argv = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--tails", str(package.path)]
            argv += ["--keys", str(package.path.parent / "keys"), "--port", str(port)]
            argv += ["--unix-socket", str(tmp_path / f"{number}.sock")]
            children.append(stack.enter_context(process(argv, tmp_path / f"log{number}", environment(home))))
        for child, port, number in zip(children, ports, range(3), strict=True):
            wait_ready(child, port, tmp_path / f"log{number}")
        balancer = stack.enter_context(process([haproxy, "-f", str(config)], tmp_path / "log"))
        wait_ready(balancer, front, tmp_path / "log")
        threads = [threading.Thread(target=ask, args=(row,)) for row in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for_answers(200)
            children[0].kill()
            wait_for_answers(200)
            children[1].send_signal(signal.SIGTERM)
            wait_for_answers(200)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert set(counts) == {"right"}, counts


class EmptyAnswers(http.server.BaseHTTPRequestHandler):
    """Answers every request with 200 and nothing."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def log_message(self, *args: object) -> None:
        pass


@contextlib.contextmanager
def balancing_tls(haproxy: str, package: Exported, folder: Path, name: str = "localhost") -> Iterator[int]:
    """Run HAProxy before a replica that answers everything with 200; yield the port, which is plain HTTP.

    Args:
        haproxy: the program.
        package: what is exported.
        folder: for files.
        name: that of the replica's certificate, which is of the authority that HAProxy trusts.
    """
    certificate, key = write_certificate(folder, name)
    (folder / "ca.pem").write_bytes(certificate.read_bytes())
    (folder / "haproxy.pem").write_bytes(certificate.read_bytes() + key.read_bytes())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyAnswers))
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        replica = ("--replica", f"https://localhost:{server.server_port}")
        config, front = export(package, folder, "haproxy", *replica) / "haproxy.cfg", free_port()
        config.write_text(
            config.read_text().replace("bind *:8443 ssl crt haproxy.pem", f"bind 127.0.0.1:{front}")
        )
        env = {**os.environ, "EDGEKIT_TOKEN": TOKEN}
        argv = [haproxy, "-C", str(folder), "-f", str(config)]
        balancer = stack.enter_context(process(argv, folder / "log", env))
        wait_listening(balancer, front, folder / "log")
        yield front


def wait_listening(child: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    """Return when a process accepts connections."""
    end = time.monotonic() + 30
    while child.poll() is None and time.monotonic() < end:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@contextlib.contextmanager
def posting(port: int, size_bytes: int, authorization: str = "") -> Iterator[http.client.HTTPConnection]:
    """Send the head of a request whose body has so many bytes, and not the body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.putrequest("POST", "/v2/models/m/infer")
    connection.putheader("Content-Length", str(size_bytes))
    if authorization:
        connection.putheader("Authorization", authorization)
    connection.endheaders()
    with contextlib.closing(connection):
        yield connection


@pytest.mark.parametrize(("name", "status"), [("localhost", 200), ("another.example", 503)])
def test_replica_with_the_certificate_of_another_name_gets_no_request(
    haproxy: str, package: Exported, tmp_path: Path, name: str, status: int
) -> None:
    with (
        balancing_tls(haproxy, package, tmp_path, name) as front,
        posting(front, 4, f"Bearer {TOKEN}") as connection,
    ):
        connection.send(b"body")
        assert connection.getresponse().status == status


@pytest.mark.parametrize("authorization", ["", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN}x", f"Basic {TOKEN}"])
def test_balancer_refuses_who_has_no_token_before_the_body(
    haproxy: str, package: Exported, tmp_path: Path, authorization: str
) -> None:
    with (
        balancing_tls(haproxy, package, tmp_path) as front,
        posting(front, 16 << 20, authorization) as connection,
    ):
        answer = connection.getresponse()  # none of the body is sent
        assert answer.status == 401
        assert answer.getheader("WWW-Authenticate") == "Bearer"
        assert "token" in json.load(answer)["error"]


def test_balancer_waits_longer_for_the_body_of_a_slow_link_than_for_a_head(
    haproxy: str, package: Exported, tmp_path: Path
) -> None:
    """With the limit of a head shortened to 0.1 s; a slow machine makes the body slower still."""
    folder = tmp_path / "balancer"
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), EmptyAnswers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        replica = ("--replica", f"127.0.0.1:{server.server_port}")
        config, front = export(package, folder, "haproxy", *replica) / "haproxy.cfg", free_port()
        text = config.read_text().replace("127.0.0.1:8090", f"127.0.0.1:{front}")
        assert "timeout http-request 10s" in text
        config.write_text(text.replace("timeout http-request 10s", "timeout http-request 100ms"))
        with process([haproxy, "-f", str(config)], tmp_path / "log") as balancer:
            wait_listening(balancer, front, tmp_path / "log")
            with posting(front, 8) as connection:
                for _ in range(8):
                    time.sleep(0.1)
                    connection.send(b"x")
                assert connection.getresponse().status == 200
        server.shutdown()


@pytest.mark.parametrize("row_bytes", [1, 150_528, 100_000_000])
def test_buffers_of_all_connections_of_the_balancer_fit_into_two_gibibytes(
    tmp_path: Path, row_bytes: int
) -> None:
    write_haproxy((make_tail(("N", row_bytes)),), tmp_path, ("127.0.0.1:1",))
    text = (tmp_path / "haproxy.cfg").read_text()
    settings = {line.split()[0]: line.split()[1] for line in text.splitlines() if len(line.split()) == 2}
    connections, buffer_bytes = int(settings["maxconn"]), int(settings["tune.bufsize"])
    assert buffer_bytes >= min(4 * row_bytes, 16 << 20)
    assert 31 <= connections <= 4096
    assert connections * 4 * buffer_bytes <= 2 << 30
    assert "2048 MiB" in text


def read_documents(path: Path) -> list[Any]:
    """Return the documents of a YAML file of which each is JSON."""
    return [json.loads(document) for document in path.read_text().split("---\n")]


def test_manifests_are_those_that_kubernetes_knows(package: Exported, tmp_path: Path) -> None:
    folder = export(package, tmp_path / "kserve", "kserve")
    path = folder / "kubernetes.yaml"
    items = read_documents(path)
    kinds = ["ConfigMap", "Deployment", "Service", "HorizontalPodAutoscaler", "PodDisruptionBudget"]
    assert [item["kind"] for item in items] == kinds
    container = items[1]["spec"]["template"]["spec"]["containers"][0]
    assert {"startupProbe", "readinessProbe", "livenessProbe", "resources"} <= set(container)
    assert container["securityContext"]["runAsNonRoot"] is True
    assert (folder / package.path.name).read_bytes() == package.path.read_bytes()
    found = cached_environment(
        "kubernetes-validate",
        *("kubernetes-validate", "pyyaml", "jsonschema", "typing-extensions", "importlib-resources"),
        *("packaging", "referencing", "attrs", "jsonschema-specifications", "rpds-py"),
        may_make=os.environ.get("EDGEKIT_KUBERNETES") == "1",
    )
    if found is None:
        pytest.skip("no kubernetes-validate in the cache; EDGEKIT_KUBERNETES=1 installs it by pip (144 MB)")
    argv = [found / "bin/kubernetes-validate", "--strict", path]
    result = subprocess.run(argv, check=False, capture_output=True, text=True)
    assert result.returncode == 0, f"{result.stdout}{result.stderr}"
    for kind in kinds:
        assert kind.lower() in f"{result.stdout}{result.stderr}".lower()


def test_replica_of_kubernetes_states_times_and_load_as_offload_serve_does(
    package: Exported, tmp_path: Path
) -> None:
    """The exported container's command and configuration, with paths and port of this machine."""
    folder, port = export(package, tmp_path / "kserve", "kserve"), free_port()
    config_map, deployment = read_documents(folder / "kubernetes.yaml")[:2]
    text = config_map["data"]["service.toml"]
    certificate, key = write_certificate(tmp_path)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "token").chmod(0o600)
    here = {
        "/run/edgekit/edgekit.sock": tmp_path / "socket",
        "/etc/edgekit/tls/tls.crt": certificate,
        "/etc/edgekit/tls/tls.key": key,
        "/etc/edgekit/token/token": tmp_path / "token",
        "0.0.0.0": "127.0.0.1",  # noqa: S104  # of the pod
        "8000": port,
    }
    for there, where in here.items():
        assert text.count(there) == 1
        text = text.replace(there, str(where))
    (tmp_path / "service.toml").write_text(text)
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    mounted = {"/packages": folder, "/keys": package.path.parent / "keys"}
    mounted["/etc/edgekit/config/service.toml"] = tmp_path / "service.toml"
    arguments = [str(mounted.get(word, word)) for word in container["args"]]
    argv = [sys.executable, "-m", "edgekit_runtime.cli", *container["command"][1:], *arguments]
    with process(argv, tmp_path / "log", environment(tmp_path)) as child:
        wait_ready(child, tmp_path / "socket", tmp_path / "log")
        server = OffloadServer(Address.parse(f"https://127.0.0.1:{port}", str(certificate)), TOKEN)
        expected = (TensorSpec("logits", "float32", (8, 10)),)
        request = make_tail_request(package.tail, package.sent, expected, "identity", server.fields)
        replies = [server.send(request, 30, lambda *_: None) for _ in range(2)]
        for pending in replies:
            assert pending.done.wait(30)
            assert pending.reply is not None
            assert pending.reply.outputs is not None, pending.reply.error
            np.testing.assert_allclose(pending.reply.outputs["logits"], package.expected["logits"], **CLOSE)
            assert None not in (pending.reply.times.queue_s, pending.reply.times.compute_s)
            assert pending.reply.times.load is not None
        server.close()


def test_manifests_of_kserve_have_the_fields_that_it_needs(package: Exported, tmp_path: Path) -> None:
    """kubernetes-validate has no schemas of these two kinds: this checks their form only."""
    folder = export(package, tmp_path / "kserve", "kserve")
    runtime, service = read_documents(folder / "kserve.yaml")
    assert (runtime["apiVersion"], runtime["kind"]) == ("serving.kserve.io/v1alpha1", "ServingRuntime")
    assert (service["apiVersion"], service["kind"]) == ("serving.kserve.io/v1beta1", "InferenceService")
    model = service["spec"]["predictor"]["model"]
    assert model["runtime"] == runtime["metadata"]["name"]
    assert model["modelFormat"]["name"] in [one["name"] for one in runtime["spec"]["supportedModelFormats"]]
    assert model["protocolVersion"] in runtime["spec"]["protocolVersions"]
    assert [one["name"] for one in runtime["spec"]["containers"]] == ["kserve-container"]
    assert (folder / "repository" / package.tail / "config.pbtxt").exists()


@pytest.mark.parametrize(("shape", "size_bytes"), [([1, 10], 0), ([1, 10], 36), ([0, 10], 40), ([2, 10], 40)])
def test_answer_that_is_shorter_than_its_shape_is_refused(shape: list[int], size_bytes: int) -> None:
    """What Triton's Python backend does with numpy 2: it answers 200, and the tensor is empty."""
    output = {"name": "logits", "datatype": "FP32", "shape": shape}
    head = json.dumps(
        {"model_name": "m", "outputs": [{**output, "parameters": {"binary_data_size": size_bytes}}]}
    ).encode()

    class Short(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Inference-Header-Content-Length", str(len(head)))
            self.send_header("Content-Length", str(len(head) + size_bytes))
            self.end_headers()
            self.wfile.write(head + bytes(size_bytes))

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Short) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with (
                Client(f"127.0.0.1:{server.server_port}") as client,
                pytest.raises(EdgekitError, match="logits"),
            ):
                client.infer("m", {"x": np.zeros((1, 4), np.float32)})
        finally:
            server.shutdown()
            thread.join()
