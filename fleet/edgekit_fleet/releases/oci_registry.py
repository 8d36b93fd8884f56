"""Fetches a package that lies as an artifact in an OCI registry, named by its digest.

    oci://HOST[:PORT]/NAME@sha256:DIGEST

The artifact's manifest lists one layer: the package file, as `oras push HOST/NAME:TAG model.edgekit` makes it. Its
own signature is checked as that of any other package; the registry only has to be the place where it lies.

Source: OCI Image and Distribution Specifications 1.1. oras asks the registry (tokens, credentials of `docker
login`), and does not check digests: that is done here.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import ConfigError, DigestError, PackageError, TransportError

_REFERENCE: Final = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(:[0-9]+)?)/(?P<name>[a-z0-9._/-]+)@sha256:(?P<digest>[0-9a-f]{64})"
)
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_TITLE: Final = "org.opencontainers.image.title"
_MANIFEST_BYTES: Final = 1 << 20
_PACKAGE_BYTES: Final = 2 << 30
_PIECE_BYTES: Final = 1 << 20
_LOOPBACK: Final = ("127.0.0.1", "localhost")


def is_reference(text: str) -> bool:
    """Return whether a text names something in a registry instead of a file."""
    return text.startswith("oci://")


def fetch_package(reference: str, folder: Path) -> Path:
    """Return a package from a registry, as a file in `folder`.

    Args:
        reference: as above. Registries on this machine are asked by HTTP, all others by HTTPS.
        folder: where the file goes.

    Raises:
        ConfigError: the reference is malformed or names no digest, or oras is missing.
        TransportError: the registry cannot be reached, or refuses.
        DigestError: it sent something else.
        PackageError: the artifact is not one package.
    """
    found = _REFERENCE.fullmatch(reference)
    if found is None:
        raise ConfigError(
            f"{reference} names no artifact, expected oci://HOST/NAME@sha256:DIGEST; a tag may be moved to"
            " another package, so it does not do"
        )
    try:
        from oras.client import OrasClient
        from oras.container import Container
        from requests import RequestException
    except ModuleNotFoundError as cause:
        raise ConfigError(
            f"{cause.name} is missing, which asks registries: pip install edgekit[oci]"
        ) from cause
    host, digest = found["host"], found["digest"]
    client = OrasClient(insecure=host.rpartition(":")[0] in _LOOPBACK or host in _LOOPBACK)
    container = Container(f"{host}/{found['name']}@sha256:{digest}")
    try:
        client.auth.load_configs(container)
        manifest_path = folder / "manifest.json"
        url = f"{client.prefix}://{container.manifest_url()}"
        _fetch(client, url, manifest_path, digest=digest, most_bytes=_MANIFEST_BYTES)
        layer = _find_layer(manifest_path.read_bytes(), reference)
        path = folder / _file_name(layer, found["name"])
        url = f"{client.prefix}://{container.get_blob_url(layer['digest'])}"
        _fetch(client, url, path, digest=layer["digest"].removeprefix("sha256:"), most_bytes=layer["size"])
    except (RequestException, ValueError) as cause:
        raise TransportError(f"{reference}: {cause}") from cause
    return path


def _fetch(client: Any, url: str, path: Path, *, digest: str, most_bytes: int) -> None:
    """Write what lies at `url` to a file, if it has this SHA-256 and no more bytes."""
    hasher, size_bytes = hashlib.sha256(), 0
    with client.do_request(url, headers={"Accept": f"{_MANIFEST}, */*"}, stream=True) as response:
        if response.status_code != 200:
            raise TransportError(f"{url}: the registry answers {response.status_code} {response.reason}")
        with path.open("wb") as file:
            for piece in response.iter_content(_PIECE_BYTES):
                size_bytes += len(piece)
                if size_bytes > most_bytes:
                    raise DigestError(f"{url}: over {most_bytes} bytes came, expected no more")
                hasher.update(piece)
                file.write(piece)
    if hasher.hexdigest() != digest:
        raise DigestError(f"{url}: sha256 is {hasher.hexdigest()}, expected {digest}")


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
    return Path(title if isinstance(title, str) else name).name or "package"
