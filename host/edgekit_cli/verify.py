"""`edgekit verify`: checks that a trusted key signed a package and that it works on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from edgekit_cli.shared_options import as_json_option, keys_folder_option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgekit_runtime.package.archive import OpenedPackage
    from edgekit_runtime.sessions.selftest import OutputCheck
    from edgekit_runtime.trust.trust_store import TrustStore

_OK = ("ok", "green")  # a mark and its style


@click.command("verify")
@click.argument("package", type=click.Path(path_type=Path))
@click.option(
    "--key",
    "key_files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Trust this public key (a PEM file). May be repeated.",
)
@keys_folder_option("Trust the keys *.pub.pem in this folder.  [default without --key: `edgekit keys list`]")
@click.option("--no-self-test", is_flag=True, help="Do not run the model on its golden inputs.")
@as_json_option
def command(
    package: Path, *, key_files: tuple[Path, ...], keys_folder: Path | None, no_self_test: bool, as_json: bool
) -> None:
    """Check the format, digests, signature and evidence of PACKAGE, and run its self-tests on this machine.

    Each variant is tested. A variant whose engine is not installed is shown as not run. If no engine is
    installed, the command fails.

    Exit code 0 means that all checks passed. docs/reference/exit-codes.md lists the other codes.
    """
    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.package.variants import DEFAULT_VARIANT
    from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence

    # One line as soon as a check has passed, so that the checks passed before an error are visible.
    def report(check: str, detail: str, mark: tuple[str, str] = _OK) -> None:
        if not as_json:
            from edgekit_host.terminal import open_console, print_line

            print_line(open_console(), mark, f"{check}:", detail, indent=3)

    trust = _choose_trust(key_files, keys_folder)
    with read_package(package, trust) as opened:
        manifest = opened.manifest
        report("form and digests", f"{manifest.file_name}, {len(manifest.artifacts)} artifacts")
        report("signature", f"by the trusted key {opened.key_id}")
        evidence = evidence_path(package)
        has_evidence = evidence.exists()
        if has_evidence:
            read_evidence(evidence, package, trust)
            report("evidence", f"{evidence.name} is about this package, by a trusted key")
        tests = [] if no_self_test else _run_selftests(opened)
        for test in tests:
            of = "" if test.variant == DEFAULT_VARIANT else f"variant {test.variant}: "
            for check in test.checks:
                report("self-test", of + check.message)
            if test.not_run is not None:
                report("self-test", f"{of}not run: {test.not_run}", ("--", "yellow"))
        if as_json:
            _print_json(opened, evidence if has_evidence else None, None if no_self_test else tests)


def _choose_trust(key_files: tuple[Path, ...], keys_folder: Path | None) -> TrustStore:
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX
    from edgekit_runtime.trust.trust_store import TrustStore, read_public_key

    folder = keys_folder or (None if key_files else find_keys_folder())
    in_folder = sorted(folder.glob(f"*{PUBLIC_KEY_SUFFIX}")) if folder else []
    return TrustStore((read_public_key(path) for path in (*key_files, *in_folder)), folder)


class VariantSelfTest(NamedTuple):
    """The self-test of a variant. If the test did not run, `not_run` says what is missing."""

    variant: str
    checks: tuple[OutputCheck, ...]
    not_run: str | None = None


def _run_selftests(package: OpenedPackage) -> list[VariantSelfTest]:
    """Test all variants whose engine is installed.

    Raises:
        EngineMissingError: No engine is installed for any variant.
        BackendError: A variant fails.
    """
    import contextlib

    from edgekit_runtime.errors import BackendError
    from edgekit_runtime.sessions import EngineMissingError, open_session
    from edgekit_runtime.sessions.opening.package_opening import check_first_opening
    from edgekit_runtime.sessions.selftest import run_selftest
    from edgekit_toolkit.measurement.arithmetic import processor_features
    from edgekit_toolkit.openings.model_opening import PACKAGE_LIMIT_S

    tests, variants = [], package.manifest.all_variants
    features = processor_features()
    for name, figures in [(variant.name, variant.figures) for variant in variants]:
        if (feature := figures.get("needs_feature", "")) and feature not in features:
            lack = f"it is computed by '{feature}', which this processor lacks; the device tests it"
            tests.append(VariantSelfTest(name, (), lack))
            continue
        try:
            check_first_opening(package, variants=[name], limit_s=PACKAGE_LIMIT_S)
            session = open_session(package, variant=name)
        except EngineMissingError as error:
            tests.append(VariantSelfTest(name, (), str(error)))
            continue
        with contextlib.closing(session):
            result = run_selftest(session, package.select(name))
        if not result.passed:
            wrong = "; ".join(check.message for check in result.checks if not check.passed)
            of = "" if len(variants) == 1 else f" of the variant '{name}'"
            raise BackendError(
                f"{package.path}: the self-test{of} failed, so this machine does not compute what the package"
                f" promises: {wrong}; update the engine, or package the model for it"
            )
        tests.append(VariantSelfTest(name, result.checks))
    missing = [test.not_run for test in tests if test.not_run is not None]
    if len(missing) == len(tests):
        raise EngineMissingError(
            f"{package.path}: the self-test cannot run: {'; '.join(missing)}; --no-self-test checks the rest"
        )
    return tests


def _print_json(
    package: OpenedPackage, evidence: Path | None, tests: Sequence[VariantSelfTest] | None
) -> None:
    import dataclasses
    import json

    ran = [
        {"variant": test.variant, **dataclasses.asdict(check)}
        for test in tests or ()
        for check in test.checks
    ]
    manifest = package.manifest
    document = {
        "path": str(package.path),
        "name": manifest.name,
        "version": manifest.version,
        "target": manifest.target,
        "key_id": package.key_id,
        "evidence": None if evidence is None else str(evidence),
        "self_test": None if tests is None else ran,
        "not_run": {test.variant: test.not_run for test in tests or () if test.not_run is not None},
    }
    click.echo(json.dumps(document, indent=2))
