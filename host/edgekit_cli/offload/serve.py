"""`edgekit offload serve`: serves the server parts of packages."""

from __future__ import annotations

import os
import resource
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from collections.abc import Sequence

_MAX_DEVICES: Final = 4096  # 256 KiB each at most
_MOST_DEVICES: Final = 16_384  # connections of the service
_DESCRIPTORS: Final = 3  # of one TLS connection
_RESERVED_DESCRIPTORS: Final = 256  # for models, libraries and handshakes
_SUFFIX = ".edgepkg"


@click.command("serve")
@click.argument("packages", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--whole",
    multiple=True,
    metavar="PACKAGE",
    type=click.Path(path_type=Path),
    help="Package whose whole model is served instead of a tail of the same name, on a machine between"
    " device and server. Its session can use the server that `edgekit-device offload server` has set on this"
    " machine.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(1, 65535), help="TCP port.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="Certificate, a PEM file.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Key of the certificate, a PEM file.")
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the token that devices must send."
)
@click.option(
    "--threads", type=click.IntRange(min=1), help="Threads of one inference.  [default: as packaged]"
)
@click.option(
    "--max-devices",
    type=click.IntRange(1, _MOST_DEVICES),
    help=f"TLS connections at one time.  [default: {_MAX_DEVICES}, or what the limit of descriptors allows]",
)
@click.option("--keys", type=click.Path(path_type=Path), help="Folder of trusted keys.  [default: your own]")
def command(
    packages: tuple[Path, ...],
    *,
    whole: tuple[Path, ...],
    host: str,
    port: int,
    tls_cert: Path | None,
    tls_key: Path | None,
    token_file: Path | None,
    threads: int | None,
    max_devices: int | None,
    keys: Path | None,
) -> None:
    """Serve the server parts of PACKAGES (files or folders) until SIGTERM or Ctrl-C.

    This starts `edgekit-device serve`, which reports its times and its load in each response. When it is
    nearly overloaded it answers 503, so that devices compute locally. Addresses other than 127.0.0.1 need a
    certificate and a token.
    """
    from edgekit_offload.export.service_config import service_config

    listen: dict[str, Any] = {"unix_socket": "", "host": host, "port": port}
    for name, path in (("tls_certificate", tls_cert), ("tls_key", tls_key), ("token_file", token_file)):
        if path is not None:
            listen[name] = str(path.absolute())
    names = _list_tails(packages)
    devices = _count_devices(max_devices)
    text = service_config(names, listen, devices=devices, threads=threads)
    url = f"{'http' if tls_cert is None else 'https'}://{f'[{host}]' if ':' in host else host}:{port}"
    for name in names:
        click.echo(f"  {name}", err=True)
    how_many = "" if tls_cert is None else f" for at most {devices} devices"
    message = f"Tails: {len(names)}{how_many}. On each device: {_device_command(url, tls_cert, token_file)}"
    click.echo(message, err=True)
    arguments = [word for path in packages for word in ("--tails", str(path))]
    arguments += [word for path in whole for word in ("--package", str(path))]
    if keys is not None:
        arguments += ["--keys", str(keys)]
    _become_service(text, arguments)


def _count_devices(requested: int | None) -> int:
    """Return the maximum number of connected devices.

    Raises:
        ConfigError: This process may not have enough file descriptors for the requested number.
    """
    from edgekit_runtime.errors import ConfigError

    _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)  # the service raises its own limit to this one
    if limit == resource.RLIM_INFINITY:
        return requested or _MAX_DEVICES
    possible = max((limit - _RESERVED_DESCRIPTORS) // _DESCRIPTORS, 1)
    if requested is not None and requested > possible:
        raise ConfigError(
            f"--max-devices {requested}: a device takes {_DESCRIPTORS} descriptors, a process may have"
            f" {limit} here; expected at most {possible}, or raise the limit (`ulimit -n`, LimitNOFILE of"
            " systemd)"
        )
    return requested or min(_MAX_DEVICES, possible)


def _device_command(url: str, tls_cert: Path | None, token_file: Path | None) -> str:
    """Return the command that uses this server on a device. The files in it are copies on the device."""
    words = ["edgekit-device", "offload", "server", url]
    if token_file is not None:
        words += ["--token-file", shlex.quote(token_file.name)]
    if tls_cert is not None:
        words += ["--ca-file", shlex.quote(tls_cert.name)]
    return " ".join(words)


def _list_tails(packages: Sequence[Path]) -> list[str]:
    """Return the names of the served tails.

    Raises:
        CutError: There are no tails.
    """
    from edgekit_runtime.errors import CutError
    from edgekit_runtime.package.archive import read_unverified_manifest  # the service verifies them
    from edgekit_runtime.package.submodels import list_tails, served_name

    names = []
    for path in packages:
        for file in sorted(path.glob(f"*{_SUFFIX}")) if path.is_dir() else [path]:
            manifest = read_unverified_manifest(file, check_artifacts=False).manifest
            artifacts = {artifact.path: artifact for artifact in manifest.artifacts}
            tails = list_tails(manifest.submodels)
            names += [served_name(manifest.name, tail, artifacts) for tail in tails]
    if not names:
        raise CutError(
            f"{', '.join(map(str, packages))}: no package has a server's half; make one with"
            " `edgekit offload plan`"
        )
    return list(dict.fromkeys(names))


def _become_service(config: str, arguments: Sequence[str]) -> None:
    """Replace this process with the service, whose configuration is in memory."""
    descriptor = os.memfd_create("edgekit-offload-serve.toml", 0)  # inherited
    os.write(descriptor, config.encode())
    os.lseek(descriptor, 0, os.SEEK_SET)
    command = [sys.executable, "-m", "edgekit_runtime.cli", "serve"]
    command += ["--config", f"/proc/self/fd/{descriptor}", *arguments]
    sys.stderr.flush()
    os.execv(sys.executable, command)  # noqa: S606  # no shell
