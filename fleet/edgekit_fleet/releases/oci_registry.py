"""Downloads a package that is stored as an artifact in an OCI registry and named by its digest.

    oci://HOST[:PORT]/NAME@sha256:DIGEST

The artifact's manifest has one layer, the package file, as created by `oras push HOST/NAME:TAG FILE`. The
package's own signature is verified as for any other package.

The credentials are those of `docker login` (`auths` in config.json). Credential helpers are not supported.

Source: OCI Image and Distribution Specifications 1.1; Docker's token authentication. oras-py 0.2.43 was
tried, but it takes two minutes to report an unreachable registry, and does not check digests.
"""

import base64
import hashlib
import json
import os
import re
import urllib.parse
import urllib.request
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from urllib.error import HTTPError

from edgekit_runtime.errors import ConfigError, DigestError, PackageError, TransportError

_REFERENCE: Final = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(:[0-9]+)?)/(?P<name>[a-z0-9._/-]+)@sha256:(?P<digest>[0-9a-f]{64})"
)
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_TITLE: Final = "org.opencontainers.image.title"
_CHALLENGE: Final = re.compile(r'(\w+)="([^"]*)"')
_MANIFEST_BYTES: Final = 1 << 20
_PACKAGE_BYTES: Final = 2 << 30
_PIECE_BYTES: Final = 1 << 20
_TIMEOUT_S: Final = 30.0
_LOOPBACK: Final = ("127.0.0.1", "localhost")


def is_reference(text: str) -> bool:
    """Return True if a text names an artifact in a registry (`oci://...`) instead of a file."""
    return text.startswith("oci://")


def fetch_package(reference: str, folder: Path) -> Path:
    """Download a package from a registry into `folder`, and return the path of the file.

    Args:
        reference: `oci://HOST/NAME@sha256:DIGEST`. HTTP is used for a registry on this machine, else HTTPS.
        folder: The folder for the file.

    Raises:
        ConfigError: The reference is malformed or has no digest.
        TransportError: The registry cannot be reached, or refuses the request.
        DigestError: The content does not match the digest.
        PackageError: The artifact is not a single package.
    """
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            f"{reference} names no artifact, expected oci://HOST/NAME@sha256:DIGEST; a tag may be moved to"
            " another package, so it is not accepted"
        )
    registry = _Registry(match["host"], match["name"])
    manifest = folder / "manifest.json"
    registry.fetch(f"manifests/sha256:{match['digest']}", manifest, match["digest"], _MANIFEST_BYTES)
    layer = _find_layer(manifest.read_bytes(), reference)
    manifest.unlink()
    path = folder / _file_name(layer, match["name"])
    registry.fetch(f"blobs/{layer['digest']}", path, layer["digest"].removeprefix("sha256:"), layer["size"])
    return path


class _Registry:
    """One repository of a registry."""

    def __init__(self, host: str, name: str) -> None:
        scheme = "http" if host.partition(":")[0] in _LOOPBACK else "https"
        self._base, self._host = f"{scheme}://{host}/v2/{name}", host
        self._authorization = ""

    def fetch(self, kind: str, path: Path, digest: str, most_bytes: int) -> None:
        """Download content to a file, and check its SHA-256 and maximum size.

        Raises:
            TransportError: The registry cannot be reached, or refuses the request.
            DigestError: The content is too large or has another digest.
        """
        url = f"{self._base}/{kind}"
        hasher, size_bytes = hashlib.sha256(), 0
        try:
            with self._open(url) as response, path.open("wb") as file:
                while piece := response.read(_PIECE_BYTES):
                    size_bytes += len(piece)
                    if size_bytes > most_bytes:
                        raise DigestError(f"{url}: over {most_bytes} bytes came, expected no more")
                    hasher.update(piece)
                    file.write(piece)
        except HTTPError as cause:
            raise TransportError(f"{url}: the registry answers {cause.code} {cause.reason}") from cause
        except (OSError, HTTPException) as cause:
            raise TransportError(f"{url}: {cause}") from cause
        if hasher.hexdigest() != digest:
            raise DigestError(f"{url}: sha256 is {hasher.hexdigest()}, expected {digest}")

    def _open(self, url: str) -> Any:
        request = urllib.request.Request(url, headers={"Accept": f"{_MANIFEST}, */*"})  # noqa: S310
        for is_last in (False, True):
            if self._authorization:  # not sent to the target of a redirect
                request.add_unredirected_header("Authorization", self._authorization)
            try:
                return urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310
            except HTTPError as refusal:
                if refusal.code != 401 or is_last:
                    raise
                self._authorization = self._authorize(refusal.headers.get("WWW-Authenticate", ""))
        raise AssertionError

    def _authorize(self, challenge: str) -> str:
        """Return the header that answers a challenge, with a token or with name and password."""
        login = _read_login(self._host)
        if not challenge.lower().startswith("bearer "):
            return login
        fields = dict(_CHALLENGE.findall(challenge))
        realm = fields.pop("realm", "")
        if not realm.startswith(("https://", self._base.partition("/v2/")[0])):
            raise TransportError(f"{self._host} sends us to {realm!r} for a token, expected https://...")
        request = urllib.request.Request(f"{realm}?{urllib.parse.urlencode(fields)}")  # noqa: S310
        if login:
            request.add_unredirected_header("Authorization", login)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:  # noqa: S310
            try:
                answer = json.loads(response.read(_MANIFEST_BYTES))
                return f"Bearer {answer.get('token') or answer['access_token']}"
            except (ValueError, KeyError, AttributeError) as cause:
                raise TransportError(f"{realm} sends no token") from cause


def _read_login(host: str) -> str:
    """Return the header for a host that `docker login` has stored, or an empty text."""
    folder = Path(os.environ.get("DOCKER_CONFIG") or Path.home() / ".docker")
    try:
        stored = json.loads((folder / "config.json").read_bytes())["auths"][host]["auth"]
        base64.b64decode(stored, validate=True)
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return f"Basic {stored}"


def _find_layer(data: bytes, reference: str) -> dict[str, Any]:
    """Return the one layer of a manifest, checked."""
    try:
        layers = json.loads(data)["layers"]
        (layer,) = layers
        digest, size = layer["digest"], layer["size"]
    except (ValueError, KeyError, TypeError) as cause:
        raise PackageError(
            f"{reference} is no artifact with one file: expected a manifest with one layer"
        ) from cause
    if not isinstance(digest, str) or not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        raise PackageError(f"{reference}: its layer has the digest {digest!r}, expected sha256:...")
    if not isinstance(size, int) or not 0 < size <= _PACKAGE_BYTES:
        raise PackageError(f"{reference}: its layer has {size!r} bytes, expected 1 to {_PACKAGE_BYTES}")
    return dict(layer)


def _file_name(layer: dict[str, Any], name: str) -> str:
    annotations = layer.get("annotations")
    title = annotations.get(_TITLE) if isinstance(annotations, dict) else None
    file_name = Path(title if isinstance(title, str) else name).name
    return file_name if file_name.strip(".") and file_name.isprintable() else "package"
