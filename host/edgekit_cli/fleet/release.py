"""`edgekit fleet release`: combines packages into a release, which a rollout then offers to devices."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.fleet.fleet_options import (
    find_actor,
    folder_and_json_options,
    folder_option,
    open_fleet,
    show,
)
from edgekit_cli.fleet.fleet_server import connect, is_remote
from edgekit_cli.number_range import NumberRange
from edgekit_cli.shared_options import as_json_option, keys_folder_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from edgekit_fleet.operations.releases import ReleaseSummary


@click.command("release")
@click.argument("packages", nargs=-1)
@click.option("--name", default="", help="Name of the release.  [default: today's date and a number]")
@click.option("--note", default="", help="A note to show with it.")
@click.option("--list", "is_list", is_flag=True, help="List the releases instead.")
@click.option(
    "--min-agreement",
    type=NumberRange(0, 0.9999),
    help="Lowest agreement with the previous version, if it is low by design.  [default: 0.95 minus the drop"
    " in the evidence]",
)
@click.option(
    "--encrypt/--no-encrypt",
    default=None,
    help="Encrypt the release for the devices that may run it.  [default: as in `edgekit fleet up`]",
)
@click.option(
    "--allow-plain", is_flag=True, help="Release it without encryption although an encrypted version exists."
)
@folder_option
@keys_folder_option(
    "Release only what the keys *.pub.pem in this folder signed.  [default: `edgekit keys list`]"
)
@as_json_option
def command(
    packages: tuple[str, ...],
    *,
    name: str,
    note: str,
    is_list: bool,
    min_agreement: float | None,
    encrypt: bool | None,
    allow_plain: bool,
    path: Path | None,
    keys_folder: Path | None,
    as_json: bool,
) -> None:
    """Create a release of PACKAGES, with one package for each model and device class.

    A package is a file, or an artifact in a registry such as oci://HOST/NAME@sha256:DIGEST.

    Afterwards `edgekit fleet rollout plan RELEASE --to SELECTOR` shows which devices would get it.
    """
    if not packages and not is_list:
        raise click.UsageError("name at least one package, or --list")
    if encrypt and allow_plain:
        raise click.UsageError("--encrypt and --allow-plain exclude each other")
    settings = {"name": name, "note": note, "min_agreement": min_agreement}
    settings |= {"encrypt": encrypt, "allow_plain": allow_plain}
    if is_list:
        releases = _list(path)
    else:
        if is_remote(path) and keys_folder is not None:
            raise click.UsageError("--keys is for a folder; a server trusts the keys of its own machine")
        with tempfile.TemporaryDirectory(prefix="edgekit-release-") as fetched:
            files = [_find_file(package, Path(fetched)) for package in packages]
            if is_remote(path):
                releases = [_make_there(files, settings)]
            else:
                releases = [_make_here(path, files, keys_folder, settings)]
    none = "no releases; make one: edgekit fleet release PACKAGE..."
    lines = [line for release in releases for line in _describe(release)]
    show(releases, lines or [none], as_json=as_json)


def _describe(release: ReleaseSummary) -> Iterator[str]:
    states = [name for name in ("encrypted", "withdrawn") if getattr(release, f"is_{name}")]
    state = f" ({', '.join(states)})" if states else ""
    yield f"{release.name}{state}  {release.note}".rstrip()
    for model, version, target, size_bytes in release.packages:
        yield f"  {model} {version} for {target}, {size_bytes / 1e6:.3f} MB"
    for model, target, version, size_bytes in release.deltas:
        source = f"from {version}" if version else "coded"
        yield f"  {model} for {target} {source}: {size_bytes / 1e6:.3f} MB"


def _find_file(package: str, folder: Path) -> Path:
    """Return the file of a package. A package in a registry is downloaded into `folder`."""
    from edgekit_fleet.releases.oci_registry import fetch_package, is_reference

    if is_reference(package):
        target = folder / package.rpartition(":")[2]
        target.mkdir()
        return fetch_package(package, target)
    if not Path(package).is_file():
        raise click.UsageError(f"there is no file {package}")
    return Path(package)


def _list(path: Path | None) -> list[ReleaseSummary]:
    with connect(path) as fleet:
        from edgekit_fleet.api.client import list_all
        from edgekit_fleet.api.endpoints.releases import ListPage, list_releases

        return list(list_all(fleet, list_releases, ListPage))


def _make_there(packages: list[Path], settings: dict[str, Any]) -> ReleaseSummary:
    """Upload packages to a server, and create a release of them."""
    with connect(None) as fleet:
        from edgekit_fleet.api.endpoints.releases import (
            MakeRelease,
            UploadPackage,
            make_release,
            upload_package,
        )
        from edgekit_runtime.system.atomic_files import hash_file

        digests = tuple(hash_file(package) for package in packages)
        for package, sha256 in zip(packages, digests, strict=True):
            fleet.call(upload_package, UploadPackage(sha256=sha256, file=package))
        return fleet.call(make_release, MakeRelease(packages=digests, **settings))


def _make_here(
    path: Path | None, packages: list[Path], keys_folder: Path | None, settings: dict[str, Any]
) -> ReleaseSummary:
    """Create a release of packages on the fleet's own machine without a second copy of them."""
    with open_fleet(path) as (folder, store):
        from edgekit_fleet.operations import releases
        from edgekit_runtime.system.paths import find_keys_folder
        from edgekit_runtime.trust.trust_store import TrustStore

        trust = TrustStore.from_folder(keys_folder or find_keys_folder())
        return releases.make_release(folder, store, trust, packages, actor=find_actor(), **settings)


@click.command("withdraw")
@click.argument("release")
@folder_and_json_options
def withdraw(release: str, path: Path | None, as_json: bool) -> None:
    """Withdraw RELEASE, so that no rollout can use it and no device can download it.

    Devices that run the release keep it.
    """
    with connect(path) as fleet:
        from edgekit_fleet.api.endpoints.endpoint import Named
        from edgekit_fleet.api.endpoints.releases import withdraw_release

        withdrawal = fleet.call(withdraw_release, Named(name=release))
    line = f"{withdrawal.name} is withdrawn; to take devices back: edgekit fleet rollback ROLLOUT"
    show(withdrawal, [line], as_json=as_json)
