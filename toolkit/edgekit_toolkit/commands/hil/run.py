"""`edgekit hil run`: the tests on one bench or several."""

from __future__ import annotations

import os
from pathlib import Path

import click

from edgekit_runtime.errors import BenchError

_OWN_FILE = Path("bench.yaml")


@click.command("run")
@click.option(
    "--bench", "benches", multiple=True, metavar="FILE",
    help="Environment file of a bench, or the name of one of `edgekit hil benches`; may be repeated."
    "  [default: bench.yaml if it is here, else every bench that needs no hardware]",
)  # fmt: skip
@click.option("-k", "expression", metavar="EXPRESSION", help="Only tests whose name fits, as pytest has it.")
@click.option(
    "--evidence", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
    help="Where the evidence and its report are written.  [default: hil/evidence in your configuration]",
)  # fmt: skip
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write JUnit's XML.")
@click.option(
    "--soak-seconds", type=click.IntRange(1), default=20, show_default=True, help="Length of the soak test."
)
def command(
    benches: tuple[str, ...],
    *,
    expression: str | None,
    evidence: Path | None,
    junit: Path | None,
    soak_seconds: int,
) -> None:
    """Run the tests, by pytest with labgrid underneath."""
    import pytest

    import edgekit_hil
    from edgekit_hil.benches.bench_file import find_bench
    from edgekit_hil.tests.models import MODELS

    named = benches or ((str(_OWN_FILE),) if _OWN_FILE.exists() else ())
    if not benches and named and _OWN_FILE.stat().st_uid != os.geteuid():
        # labgrid runs the Python files that an environment file imports.
        raise BenchError(
            f"{_OWN_FILE} belongs to another user, and can run code; --bench {_OWN_FILE} takes it"
        )
    for each in named:
        find_bench(each)  # a malformed file is refused before anything begins
    if not MODELS.is_dir():
        raise BenchError(
            f"the models that the tests install are in a checkout of edgekit, and {MODELS} is none"
        )
    folder = Path(edgekit_hil.__file__).parent / "tests"
    arguments = [
        "-c",
        "/dev/null",
        f"--rootdir={folder}",
        "--import-mode=importlib",
        "-v",
        "-ra",
        "--tb=short",
    ]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # labgrid, which is imported by now
    arguments += ["-p", "no:labgrid", "-p", "no:cacheprovider", "-p", "edgekit_hil.tests.plugin"]
    arguments += [f"--bench={Path(each).absolute() if Path(each).exists() else each}" for each in named]
    arguments += [f"--soak-seconds={soak_seconds}"]
    for option, value in (("-k", expression), ("--evidence", evidence), ("--junitxml", junit)):
        if value is not None:
            arguments += [option, str(value)]
    code = pytest.main([*arguments, str(folder)])
    if code == pytest.ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if code == pytest.ExitCode.NO_TESTS_COLLECTED:
        raise click.UsageError(f"-k {expression!r} fits no test")
    if code != pytest.ExitCode.OK:
        raise BenchError("a test failed or a named bench could not be used; the reasons stand above")
