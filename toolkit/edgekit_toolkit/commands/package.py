"""`edgekit package`: turn a trained model into a signed package that keeps a device's budget."""

from __future__ import annotations

import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rich.console import Console

    from edgekit_toolkit.packaging import Request, Run
    from edgekit_toolkit.sign import StatementSigner

# As the manifest takes them.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}")
_MAX_SIZE = 2**31 - 1


@click.command("package")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--target", "-t", help="Device class: a name of `edgekit targets`, or a .toml file of your own."
)
@click.option(
    "--budget", "-b", default="", metavar="LIMITS",
    help="Limits that hold at once, such as size=10MB,latency=5ms,memory=64MB,energy=20mJ,drop=1%. "
    "Unless given, size=10MB and drop=1%.",
)  # fmt: skip
@click.option(
    "--calibration", type=click.Path(path_type=Path), help="Samples for ranges: .npz, .npy or a folder."
)
@click.option(
    "--eval", "evaluation", type=click.Path(path_type=Path), help="Samples to judge by; labels in `y`."
)
@click.option(
    "--metric", default="auto", show_default=True,
    help="auto, top1, top5, agreement, similarity, or FILE.py:FUNCTION (your own code, run as you).",
)  # fmt: skip
@click.option(
    "--recipe", type=click.Path(path_type=Path), help="Repeat an earlier package: no search, same bytes."
)
@click.option(
    "--out",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("packages"),
    show_default=True,
    help="Folder for the results.",
)
@click.option("--name", help="Name of the package. [default: the model's file name]")
@click.option("--version", "version", default="1.0.0", show_default=True, help="Version of the package.")
@click.option("--batch", type=click.IntRange(1, _MAX_SIZE), help="Fix the batch. [default: as it is]")
@click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of a free dimension, for measuring."
)
@click.option(
    "--labels", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Class names, one a line."
)
@click.option(
    "--preprocessing",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="JSON object that travels with the model.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    help="Threads while judging. [default: the cores here, 4 at most]",
)
@click.option(
    "--search-seconds",
    "search_s",
    type=click.FloatRange(min=0),
    default=50.0,
    show_default=True,
    help="Time for the mixed-precision search.",
)
@click.option(
    "--key",
    default="default",
    show_default=True,
    help="Signing key of `edgekit keys`; the default one is made on first use.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    *,
    recipe: Path | None,
    out: Path,
    key: str,
    as_json: bool,
    **options: Any,
) -> None:
    """Package MODEL (.onnx) for a device, under a budget, with proof.

    Optimises, quantizes and measures candidates, chooses the fastest that keeps every limit, and writes a
    signed package with evidence, recipe and report; or refuses and says which limit stands in the way.
    """
    _import_engines()
    from edgekit_toolkit.terminal import open_console

    console = open_console(stderr=as_json)  # with --json only the progress bar is for people
    try:
        if recipe is None:
            _search(_request(model, options), out, key, console, as_json=as_json)
        else:
            _check_alone(ctx)
            _repeat(model, recipe, out, key, console, as_json=as_json)
    except MemoryError as error:
        from edgekit_runtime.errors import EdgekitError

        raise EdgekitError(
            "not enough memory for inputs of this size; give a smaller --batch or --dim"
        ) from error


def _import_engines() -> None:
    """Import what is slow to import; Ctrl-C waits, because extension modules crash when it strikes there."""
    interrupts: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # only there can a handler be set
    before = signal.getsignal(signal.SIGINT)
    if in_main:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        import edgekit_toolkit.document
        import edgekit_toolkit.terminal  # noqa: F401
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _request(model: Path, options: Mapping[str, Any]) -> Request:
    from edgekit_toolkit.budget import parse_budget
    from edgekit_toolkit.packaging import Request
    from edgekit_toolkit.targets import load_target, user_target_dir

    if options["target"] is None:
        raise click.UsageError("Missing option '--target'; `edgekit targets` lists them.")
    budget = parse_budget(options["budget"])
    target = load_target(options["target"], [user_target_dir()])
    name = options["name"] or re.sub(r"[^A-Za-z0-9._-]+", "_", model.stem)[:64].strip("._-") or "model"
    for what, text in (("--name", name), ("--version", options["version"])):
        if not _NAME.fullmatch(text):
            raise click.BadParameter(
                f"{text!r}: expected 1 to 64 letters, digits or '_.+-', starting with a letter or digit",
                param_hint=what,
            )
    return Request(
        model=model,
        target=target,
        budget=budget,
        name=name,
        version=options["version"],
        calibration=options["calibration"],
        evaluation=options["evaluation"],
        metric=options["metric"],
        batch=options["batch"],
        dims=_dims(options["dims"]),
        labels=_labels(options["labels"]),
        preprocessing=_preprocessing(options["preprocessing"]),
        threads=options["threads"] or _threads(),
        search_s=options["search_s"],
    )


def _threads() -> int:
    import os

    return max(1, min(4, len(os.sched_getaffinity(0))))


def _dims(given: tuple[str, ...]) -> dict[str, int]:
    dims = {}
    for item in given:
        name, equals, size = item.rpartition("=")
        if not equals or not name or not re.fullmatch("[0-9]{1,10}", size) or not 1 <= int(size) <= _MAX_SIZE:
            raise click.BadParameter(
                f"{item!r}: expected NAME=SIZE with a size from 1 to {_MAX_SIZE}", param_hint="--dim"
            )
        dims[name] = int(size)
    return dims


def _labels(path: Path | None) -> str | None:
    from edgekit_runtime.errors import DataError

    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"labels {path}: {error}; expected a UTF-8 text file with one class a line"
        ) from error
    if not text.strip():
        raise DataError(f"labels {path}: the file is empty, expected one class a line")
    return text


def _preprocessing(path: Path | None) -> dict[str, Any] | None:
    import json

    from edgekit_runtime.canonical import encode_json
    from edgekit_runtime.errors import DataError

    if path is None:
        return None
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        encode_json(value)  # refuses NaN and lone surrogates, which Python's reader takes
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"preprocessing {path}: {error}; expected a JSON object") from error
    if not isinstance(value, dict):
        raise DataError(f"preprocessing {path}: got {type(value).__name__}, expected a JSON object")
    return value


class _progress:  # noqa: N801 - used as a function: with _progress(console) as progress
    """A progress bar that says what is done now, on a terminal only."""

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
        )

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        self._bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._task = self._bar.add_task("starting", total=None)

    def __enter__(self) -> Callable[[str, int | None, int | None], None]:
        self._bar.start()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def _show(self, what: str, done: int | None, total: int | None) -> None:
        if done is None:  # a new step of unknown length; a bar keeps its total for ever
            self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=None)
        else:
            self._bar.update(self._task, description=what, completed=done, total=total)


def _search(request: Request, out: Path, key: str, console: Console, *, as_json: bool) -> None:
    import json

    from edgekit_runtime.errors import BudgetError
    from edgekit_toolkit.packaging import search
    from edgekit_toolkit.publish import output_folder
    from edgekit_toolkit.report import print_summary
    from edgekit_toolkit.sign import load_signer

    with output_folder(out):
        signer = load_signer(key)
        with _progress(console) as progress:
            run = search(request, signer, progress)
            document, written = _write(run, out, signer, progress)
    choice = run.choice
    if not as_json:
        print_summary(document, console, written)
    elif choice.chosen is not None:
        click.echo(json.dumps(document))
    if choice.chosen is None:
        raise BudgetError(
            f"{choice.reason}. To package: {choice.needed}. Report: {written[0]}",
            binding=choice.binding, closest=choice.closest, needed=choice.needed, report=str(written[1]),
        )  # fmt: skip


def _write(
    run: Run, out: Path, signer: StatementSigner, progress: Callable[[str, int | None, int | None], None]
) -> tuple[dict[str, Any], list[Path]]:
    """Write the report, and the package where one was chosen; returns the report's document and files."""
    from edgekit_toolkit.document import describe, evidence_figures
    from edgekit_toolkit.publish import evidence_of, publish, staging
    from edgekit_toolkit.report import finite_report, write_report

    published = evidence = None
    place = None if run.choice.chosen is None else run.position(run.choice.chosen)
    if place is not None:
        progress("measuring memory in a fresh process", None, None)
        evidence = evidence_of(evidence_figures(run, place, _memory(run, place)))
    progress("writing", None, None)
    with staging(out) as stage:
        if place is not None and evidence is not None:
            published = publish(run.packages[place], run.recipes[place], evidence, stage, signer)
        document = finite_report(describe(run, _command_line(), published))
        request = run.request
        written = write_report(document, stage, f"{request.name}-{request.version}-{request.target.name}")
    return dict(document), [out / path.name for path in written]


def _memory(run: Run, place: int) -> dict[str, Any] | None:
    from edgekit_toolkit.packaging import first_feeds
    from edgekit_toolkit.publish import measured_memory

    peak = measured_memory(run.packages[place], first_feeds(run))
    if peak is None:
        return None
    return {"peak_bytes": peak.total_bytes, "engine_bytes": peak.engine_bytes, "label": "measured"}


def _command_line() -> str:
    import shlex

    return shlex.join(["edgekit", *sys.argv[1:]])


def _check_alone(ctx: click.Context) -> None:
    """Refuse options whose value the recipe holds: they would be ignored."""
    given = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in {"recipe", "out", "key", "as_json"}
        and ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--recipe holds what {', '.join(given)} would decide; give it alone (with -o, --key and --json)."
        )


def _repeat(model: Path, path: Path, out: Path, key: str, console: Console, *, as_json: bool) -> None:
    """Repeat a recipe: same model, same tools and same key give the same bytes."""
    import json

    from edgekit_toolkit.publish import evidence_of, output_folder, publish, repeat, staging
    from edgekit_toolkit.recipe import read_recipe
    from edgekit_toolkit.sign import load_signer

    recipe = read_recipe(path)
    with output_folder(out):
        signer = load_signer(key)
        with _progress(console) as progress:
            progress("repeating the recipe", None, None)
            assembled = repeat(model, recipe)
            evidence = evidence_of({"repeated": recipe.sha256, "target": recipe.target})
            with staging(out) as stage:
                published = publish(assembled, recipe, evidence, stage, signer)
    package = out / published.package
    result = {
        "package": str(package), "bytes": published.size_bytes, "sha256": published.sha256,
        "key_id": published.key_id, "recipe_sha256": recipe.sha256,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(result))
    else:
        from edgekit_toolkit.terminal import print_line

        figures = f"({published.size_bytes} bytes, sha256 {published.sha256})"
        print_line(console, f"repeated {path.name}:", package, figures)
