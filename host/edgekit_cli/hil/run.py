"""`edgekit hil run`: runs the tests on one or more benches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekit_runtime.errors import BenchError, CutError, TargetError

if TYPE_CHECKING:
    from edgekit_hil.benches.bench_file import BenchFile
    from edgekit_toolkit.targets.spec import DeviceTimes

_OWN_FILE = Path("bench.yaml")


@click.command("run")
@click.option(
    "--bench",
    "benches",
    multiple=True,
    metavar="FILE",
    help="Environment file of a bench, or a name from `edgekit hil benches`. May be repeated.  [default:"
    " bench.yaml if it exists here, else every bench that needs no hardware]",
)
@click.option(
    "-k", "expression", metavar="EXPRESSION", help="Run only tests whose name matches, as in pytest."
)
@click.option(
    "--evidence",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder for the evidence and its report.  [default: hil/evidence in your configuration]",
)
@click.option("--junit", type=click.Path(dir_okay=False, path_type=Path), help="Also write a JUnit XML file.")
@click.option(
    "--soak-seconds", type=click.IntRange(1), default=20, show_default=True, help="Length of the soak test."
)
@click.option(
    "--measure-seconds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Length of a measurement of latency.",
)
@click.option(
    "--profile-seconds",
    type=click.IntRange(1),
    default=60,
    show_default=True,
    help="Length of the measurement that profiles a real device, if it has no profile yet.",
)
def command(
    benches: tuple[str, ...],
    *,
    expression: str | None,
    evidence: Path | None,
    junit: Path | None,
    soak_seconds: int,
    measure_seconds: int,
    profile_seconds: int,
) -> None:
    """Run the tests with pytest and labgrid.

    Before the tests, the command profiles a real device as `edgekit profile` does, unless its profile is
    still valid or its target prefers TensorRT. The evidence includes the times in the profile, so that
    `edgekit package` can predict latencies on such devices.
    """
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
    files = [find_bench(name) for name in named]  # a malformed file is refused before anything begins
    if not MODELS.is_dir():
        raise BenchError(
            f"the models that the tests install are in a checkout of edgekit, and {MODELS} is none"
        )
    for name, file in zip(named, files, strict=True):
        _profile_once(name, file, profile_seconds)
    folder = Path(edgekit_hil.__file__).parent / "tests"
    arguments = [
        "-c",
        "/dev/null",
        f"--rootdir={folder}",
        f"--confcutdir={folder}",  # else pytest looks through all folders above it
        "--import-mode=importlib",
        "-v",
        "-ra",
        "--tb=short",
    ]
    arguments += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # labgrid, which is imported by now
    arguments += ["--disable-plugin-autoload", "-p", "no:cacheprovider", "-p", "edgekit_hil.tests.plugin"]
    arguments += [f"--bench={Path(name).absolute() if Path(name).exists() else name}" for name in named]
    arguments += [f"--soak-seconds={soak_seconds}", f"--measure-seconds={measure_seconds}"]
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


def _profile_once(bench: str, file: BenchFile, seconds: float) -> None:
    """Measure the profile of the user's real device, unless there is a valid one."""
    from edgekit_toolkit.targets.loader import find_user_targets, load_target

    settings, folder = file.settings, find_user_targets()
    target = load_target(settings.target, [folder])
    if settings.kind != "real" or not file.keeps_state or not settings.has_time or target.backend.on_gpu:
        return
    from edgekit_cli.hil.bench_machine import find_device  # with all engines, which others need not import
    from edgekit_cli.profile import measure_profile
    from edgekit_cli.progress import ProgressBar
    from edgekit_host.terminal import open_console
    from edgekit_toolkit.measurement.device_profile import start_profile

    path = folder / f"{settings.profile_name}.toml"
    times = load_target(str(path)).device_times if path.is_file() else None
    if path.is_file() and times is None:
        return  # a target that the user wrote under this name is kept
    try:
        target = start_profile(target, settings.profile_name)
        if times is not None and _holds(times, file):
            return
        with ProgressBar(open_console(stderr=True)) as progress, find_device(bench) as device:
            profile = measure_profile(device, target, path, seconds, progress.show)
        click.echo(
            f"profile of bench '{settings.name}': {path}; networks left out of the fit were off by"
            f" {profile.fitted.uncertainty:.2f} x at most; power: {profile.describe_power()}"
        )
    except (BenchError, CutError, TargetError) as error:  # the tests say what they lack
        click.echo(f"bench '{settings.name}' is not profiled: {error}", err=True)


def _holds(times: DeviceTimes, file: BenchFile) -> bool:
    """Return whether a profile matches the current device and engine of a bench.

    Raises:
        BenchError: The bench is not available.
    """
    from edgekit_hil.benches.opening import open_bench
    from edgekit_toolkit.measurement.device_profile import is_current

    if not is_current(times) or not times.is_real:
        return False
    with open_bench(file) as opened:
        return opened.facts.model == times.device and opened.facts.has_engine(times.engine)
