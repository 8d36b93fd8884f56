"""`edgekit verify`: whether a package is what a trusted key signed, and works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgekit_runtime.archive import OpenedPackage
    from edgekit_runtime.selftest import OutputCheck, SelfTest
    from edgekit_runtime.signing import TrustStore


@click.command("verify")
@click.argument("package", type=click.Path(path_type=Path))
@click.option(
    "--key",
    "key_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Trust this public key (a PEM file); may be given several times.",
)
@click.option(
    "--keys",
    "keys_folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Trust the keys *.pub.pem in this folder.  [default without --key: `edgekit keys list`]",
)
@click.option("--no-self-test", is_flag=True, help="Do not run the model on its golden inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    package: Path, *, key_files: tuple[Path, ...], keys_folder: Path | None, no_self_test: bool, as_json: bool
) -> None:
    """Check PACKAGE: form, digests, signature, evidence beside it, and its self-test on this machine.

    Ends with exit code 0 only if all that was checked is right (docs/exit-codes.md lists the others).
    """
    from edgekit_runtime.archive import read_package
    from edgekit_runtime.evidence import evidence_path, read_evidence

    trust = _choose_trust(key_files, keys_folder)
    with read_package(package, trust) as opened:
        say = _quiet if as_json else _make_say()
        manifest = opened.manifest
        say("form and digests", f"{manifest.file_name}, {len(manifest.artifacts)} artifacts")
        say("signature", f"by the trusted key {opened.key_id}")
        evidence = evidence_path(package)
        has_evidence = evidence.exists()
        if has_evidence:
            read_evidence(evidence, package, trust)
            say("evidence", f"{evidence.name} is about this package, by a trusted key")
        checks = () if no_self_test else _run_selftest(opened).checks
        for check in checks:
            say("self-test", check.message)
        if as_json:
            _print_json(opened, evidence if has_evidence else None, None if no_self_test else checks)


def _choose_trust(key_files: tuple[Path, ...], keys_folder: Path | None) -> TrustStore:
    from edgekit_runtime.signing import PUBLIC_KEY_SUFFIX, TrustStore, find_keys_folder, read_public_key

    folder = keys_folder or (None if key_files else find_keys_folder())
    in_folder = sorted(folder.glob(f"*{PUBLIC_KEY_SUFFIX}")) if folder else []
    return TrustStore(read_public_key(path) for path in (*key_files, *in_folder))


def _quiet(_check: str, _detail: str) -> None:
    """Say nothing: the outcome is printed as JSON, in one piece."""


def _make_say() -> Callable[[str, str], None]:
    from edgekit_toolkit.terminal import open_console, print_line

    console = open_console()
    # One line as soon as a check has passed, so that it is seen what held before an error.
    return lambda check, detail: print_line(console, ("ok", "green"), f"{check}:", detail, indent=3)


def _run_selftest(package: OpenedPackage) -> SelfTest:
    import contextlib

    from edgekit_runtime.errors import BackendError
    from edgekit_runtime.selftest import run_selftest
    from edgekit_runtime.sessions import EngineMissingError, open_session

    try:
        with contextlib.closing(open_session(package)) as session:
            result = run_selftest(session, package)
    except EngineMissingError as error:
        message = f"{package.path}: the self-test cannot run: {error}; --no-self-test checks the rest"
        raise EngineMissingError(message) from error
    if not result.passed:
        wrong = "; ".join(check.message for check in result.checks if not check.passed)
        raise BackendError(
            f"{package.path}: the self-test failed, so this machine does not compute what the package"
            f" promises: {wrong}; update the engine, or package the model for it"
        )
    return result


def _print_json(
    package: OpenedPackage, evidence: Path | None, checks: tuple[OutputCheck, ...] | None
) -> None:
    import dataclasses
    import json

    manifest = package.manifest
    document = {
        "path": str(package.path),
        "name": manifest.name,
        "version": manifest.version,
        "target": manifest.target,
        "key_id": package.key_id,
        "evidence": None if evidence is None else str(evidence),
        "self_test": None if checks is None else [dataclasses.asdict(check) for check in checks],
    }
    click.echo(json.dumps(document, indent=2))
