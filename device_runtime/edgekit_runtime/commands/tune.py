"""`edgekit-device tune PACKAGE`, for a package file or an installed model."""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edgekit_runtime.autotune.contest import RunSetting
from edgekit_runtime.autotune.tune import SettingResult, Tuning, tune
from edgekit_runtime.commands.command import Outcome, report
from edgekit_runtime.commands.installed import find_keys
from edgekit_runtime.commands.measuring import add_arguments, keep, open_package
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions.backends import open_choice
from edgekit_runtime.sessions.local_results import Tuned, keep_tuned, recall_order
from edgekit_runtime.system.engines import EngineMissingError, get_engine


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "tune",
        help="find the options with which a package runs best here",
        description="Measure a package's golden inputs here with other numbers of threads, with spinning,"
        " without the arena and, for throughput, with batches and several runs at once. Options that are"
        " better than the package's own beyond chance are kept and used from then on.",
    )
    parser.add_argument("--objective", choices=("latency", "throughput"), default="latency")
    add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Outcome:
    with open_package(arguments) as package:
        own = _find_setting(package)
        choice = own.find_choice(package.manifest)
        engine = get_engine(choice.name)
        if engine is None or not engine.tunable:
            raise BackendError(
                f"{package.path}: backend '{choice.name}' has nothing to tune; it tunes itself"
            )
        tuning = tune(
            package,
            own,
            find_keys(arguments),
            objective=arguments.objective,
            seconds=arguments.seconds,
            report=report,
        )
        saved_in = keep(lambda: keep_tuned(package.manifest, choice, _to_keep(tuning)))
    return Outcome(_document(package.path, choice, tuning, saved_in), _lines(tuning, saved_in))


def _find_setting(package: OpenedPackage) -> RunSetting:
    """Return the variant and the backend that are opened here: the first whose engine is installed."""
    settings = []
    for variant in recall_order(package.manifest):
        choices = [_alone(choice) for choice in package.manifest.select(variant.name).backend.chain]
        settings += [
            RunSetting(variant.name, choices.index(_alone(choice))) for choice in variant.backend.chain
        ]
    for setting in settings[:-1]:
        try:
            open_choice(package.select(setting.variant), setting.find_choice(package.manifest)).close()
        except EngineMissingError:
            continue
        return setting
    return settings[-1]


def _alone(choice: BackendChoice) -> BackendChoice:
    return replace(choice, fallback=None)


def _to_keep(tuning: Tuning) -> Tuned:
    best = tuning.best
    low, high = tuning.interval
    figures = {"share_low": low, "share_high": high, "settings": len(tuning.trials)}
    return Tuned(tuning.objective, dict(best.options), best.instances, best.batch, figures)


def _document(path: Path, choice: BackendChoice, tuning: Tuning, saved_in: str | None) -> dict[str, Any]:
    return {
        "package": str(path),
        "label": "measured",
        "on": "this machine",
        "backend": choice.name,
        "objective": tuning.objective,
        "settings": [_describe(trial) for trial in tuning.trials],
        "best": {
            "name": tuning.best.name,
            "options": dict(tuning.best.options),
            "instances": tuning.best.instances,
            "batch": tuning.best.batch,
            "time_share_low": tuning.interval[0],
            "time_share_high": tuning.interval[1],
        },
        "is_complete": tuning.is_complete,
        "kept_in": saved_in,
    }


def _describe(trial: SettingResult) -> dict[str, Any]:
    return {
        "name": trial.setting.name,
        "options": dict(trial.setting.options),
        "instances": trial.setting.instances,
        "batch": trial.setting.batch,
        "reason": trial.reason,
        "processes": trial.processes,
        "median_ms": None if trial.latency is None else trial.latency.median_s * 1e3,
        "time_share": trial.ratio,
    }


def _lines(tuning: Tuning, saved_in: str | None) -> Iterator[str]:
    width = max(len(trial.setting.name) for trial in tuning.trials)
    yield f"  {'setting':{width}}   ms a run  of own  processes"
    for trial in tuning.trials:
        if trial.latency is None or trial.ratio is None:
            yield f"  {trial.setting.name:{width}}  {trial.reason or 'not measured: out of time'}"
            continue
        yield (
            f"  {trial.setting.name:{width}}  {trial.latency.median_s * 1e3:9.3f}"
            f"  {trial.ratio:6.2f}  {trial.processes:9}"
        )
    if not tuning.is_complete:
        yield "  the time did not suffice to measure all: give it more --seconds"
    low, high = tuning.interval
    gain = "" if tuning.best == tuning.trials[0].setting else f" ({low:.2f} to {high:.2f} of the time)"
    yield f"  {'not kept' if saved_in is None else 'kept'}: {tuning.best.name}{gain}"
