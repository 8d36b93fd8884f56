"""Packages out of an OCI registry: a real one (Debian's docker-registry), and ones that lie."""

import base64
import contextlib
import hashlib
import http.server
import json
import os
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.free_port import free_port
from tests.waiting import wait_for

from edgekit_fleet.releases.oci_registry import fetch_package
from edgekit_runtime.errors import ConfigError, DigestError, EdgekitError, PackageError, TransportError

PACKAGE = b"a package" * 1000
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield HOST:PORT of a registry on loopback."""
    if shutil.which("docker-registry") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "--no-install-recommends", "docker-registry"],
            check=False,
            capture_output=True,
        )
    if shutil.which("docker-registry") is None:
        pytest.skip("docker-registry is not installed: apt install docker-registry")
    folder, port = tmp_path_factory.mktemp("registry"), free_port()
    configuration = folder / "config.yml"
    configuration.write_text(
        f"version: 0.1\nlog: {{level: error}}\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\n"
        f"http: {{addr: '127.0.0.1:{port}'}}\n"
    )
    with subprocess.Popen(
        ["docker-registry", "serve", configuration], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as server:
        try:
            wait_for(lambda: _answers(port), "the registry")
            yield f"127.0.0.1:{port}"
        finally:
            server.kill()


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/") as answer:
        return bool(answer.status == 200)
    return False


def push(registry: str, folder: Path, *names: str) -> str:
    """Push files as one artifact, as oras does; returns its reference."""
    layers = []
    for name in names:
        data = PACKAGE + name.encode()
        layers.append({**upload(registry, data), "annotations": {"org.opencontainers.image.title": name}})
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": "application/vnd.oci.empty.v1+json", **upload(registry, b"{}")},
        "layers": [{"mediaType": "application/vnd.edgekit.package", **layer} for layer in layers],
    }
    data = json.dumps(manifest).encode()
    digest = hashlib.sha256(data).hexdigest()
    send(f"http://{registry}/v2/models/digits/manifests/sha256:{digest}", data, MANIFEST)
    return f"oci://{registry}/models/digits@sha256:{digest}"


def upload(registry: str, data: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
    begin = urllib.request.Request(f"http://{registry}/v2/models/digits/blobs/uploads/", method="POST")
    with urllib.request.urlopen(begin) as answer:  # noqa: S310
        location = answer.headers["Location"]
    send(f"{location}&digest={digest}", data, "application/octet-stream")
    return {"digest": digest, "size": len(data)}


def send(url: str, data: bytes, media_type: str) -> None:
    request = urllib.request.Request(url, data, {"Content-Type": media_type}, method="PUT")  # noqa: S310
    with urllib.request.urlopen(request) as answer:  # noqa: S310
        assert answer.status == 201


def test_pushed_package_is_fetched_by_its_digest(registry: str, tmp_path: Path) -> None:
    reference = push(registry, tmp_path, "digits-1.edgepkg")
    (tmp_path / "to").mkdir()
    path = fetch_package(reference, tmp_path / "to")
    assert (path.name, path.read_bytes()) == ("digits-1.edgepkg", PACKAGE + b"digits-1.edgepkg")


def test_artifact_of_two_files_is_no_package(registry: str, tmp_path: Path) -> None:
    with pytest.raises(PackageError, match="one layer"):
        fetch_package(push(registry, tmp_path, "a", "b"), tmp_path)


def test_digest_that_the_registry_does_not_have_is_an_error(registry: str, tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="404"):
        fetch_package(f"oci://{registry}/models/digits@sha256:{'0' * 64}", tmp_path)


@pytest.mark.parametrize(
    "reference", ["oci://host/name:1", "oci://host/name", "oci://host@sha256:12", "oci://"]
)
def test_reference_without_a_digest_is_refused(reference: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a tag may be moved"):
        fetch_package(reference, tmp_path)


def test_registry_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TransportError):
        fetch_package(f"oci://127.0.0.1:{free_port()}/models/digits@sha256:{'0' * 64}", tmp_path)


class LyingRegistry(http.server.BaseHTTPRequestHandler):
    """Answers each request for a manifest or blob with what the test put there."""

    def do_GET(self) -> None:
        answers: Any = self.server.answers  # type: ignore[attr-defined]
        body = answers["manifest" if "/manifests/" in self.path else "blob"]
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass


def describe(**changes: Any) -> bytes:
    layer = {"digest": f"sha256:{hashlib.sha256(PACKAGE).hexdigest()}", "size": len(PACKAGE), **changes}
    return json.dumps({"schemaVersion": 2, "layers": [layer]}).encode()


@pytest.mark.parametrize(
    ("manifest", "blob", "error"),
    [
        (describe(), PACKAGE[:-1] + b"!", DigestError),
        (describe(), PACKAGE + bytes(1), DigestError),
        (describe(), PACKAGE[:-1], DigestError),
        (describe(digest="sha256:../../etc"), PACKAGE, PackageError),
        (describe(size=1 << 60), PACKAGE, PackageError),
        (describe(size=-1), PACKAGE, PackageError),
        (describe(size="9"), PACKAGE, PackageError),
        (b"[]", PACKAGE, PackageError),
        (b"{", PACKAGE, PackageError),
        (bytes(2 << 20), PACKAGE, DigestError),
    ],
)
def test_registry_that_sends_something_else_is_refused(
    manifest: bytes, blob: bytes, error: type[EdgekitError], tmp_path: Path
) -> None:
    with lying(manifest, blob) as host, pytest.raises(error):
        fetch_package(f"oci://{host.name}/digits@sha256:{hashlib.sha256(manifest).hexdigest()}", tmp_path)


def test_manifest_of_another_artifact_is_refused(tmp_path: Path) -> None:
    with lying(describe(), PACKAGE) as host, pytest.raises(DigestError, match="expected 0000"):
        fetch_package(f"oci://{host.name}/digits@sha256:{'0' * 64}", tmp_path)


@pytest.mark.parametrize("title", ["../../outside.edgepkg", "/etc/outside.edgepkg", "..", "a\0b", 7])
def test_name_of_the_file_stays_in_the_folder(title: Any, tmp_path: Path) -> None:
    manifest = describe(annotations={"org.opencontainers.image.title": title})
    with lying(manifest, PACKAGE) as host:
        digest = hashlib.sha256(manifest).hexdigest()
        path = fetch_package(f"oci://{host.name}/digits@sha256:{digest}", tmp_path)
    assert path.parent == tmp_path
    assert path.read_bytes() == PACKAGE


@contextlib.contextmanager
def lying(
    manifest: bytes, blob: bytes, handler: type[http.server.BaseHTTPRequestHandler] = LyingRegistry
) -> Iterator[SimpleNamespace]:
    server: Any = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.answers = {"manifest": manifest, "blob": blob}
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield SimpleNamespace(name=f"127.0.0.1:{server.server_address[1]}", server=server)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class TokenRegistry(http.server.BaseHTTPRequestHandler):
    """Wants a token, which it sells for a name and a password; sends blobs by way of another address."""

    def do_GET(self) -> None:
        server: Any = self.server
        own = f"http://127.0.0.1:{server.server_address[1]}"
        got = self.headers.get("Authorization")
        server.seen.append((self.path.partition("?")[0], got))
        if self.path.startswith("/token"):
            self._answer(200, b'{"token": "t"}' if got == f"Basic {server.login}" else b"{}")
        elif self.path == "/elsewhere":
            self._answer(200, PACKAGE)
        elif got != "Bearer t":
            challenge = f'Bearer realm="{own}/token",service="r",scope="s"'
            self._answer(401, b"", **{"WWW-Authenticate": challenge})
        elif "/manifests/" in self.path:
            self._answer(200, describe())
        else:
            self._answer(307, b"", Location=f"{own}/elsewhere")

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: Any) -> None:
        pass


@pytest.mark.parametrize("is_known", [True, False])
def test_login_buys_a_token_that_stays_with_the_registry(
    is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    login = base64.b64encode(b"user:secret").decode()
    with lying(b"", b"", TokenRegistry) as host, monkeypatch.context() as patch:
        host.server.login, host.server.seen = login, []
        auths = {host.name: {"auth": login}} if is_known else {}
        (tmp_path / "config.json").write_text(json.dumps({"auths": auths}))
        patch.setenv("DOCKER_CONFIG", str(tmp_path))
        reference = f"oci://{host.name}/digits@sha256:{hashlib.sha256(describe()).hexdigest()}"
        if not is_known:
            with pytest.raises(TransportError, match="sends no token"):
                fetch_package(reference, tmp_path)
            return
        assert fetch_package(reference, tmp_path).read_bytes() == PACKAGE
        assert ("/elsewhere", None) in host.server.seen
