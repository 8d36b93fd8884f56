"""`edgekit package`: turns a trained model into a signed package within the budget of a device."""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.number_range import NumberRange
from edgekit_runtime.system.engines import list_registered

if TYPE_CHECKING:
    from rich.console import Console

    from edgekit_toolkit.packaging.signing_keys import StatementSigner
    from edgekit_toolkit.pipeline.request import Request
    from edgekit_toolkit.pipeline.run import Run
    from edgekit_toolkit.report.document import Report

_MAX_BATCH = 2**31 - 1
_MAX_VARIANTS = 9  # the default, and what edgekit_runtime.package.variants allows beside it
_UNTIMED_KINDS = ("float16-arithmetic",)  # as `quantize.forms` has them, whose import takes a second
_BACKENDS = ("auto", *(engine.name for engine in list_registered() if engine.file_format))


@click.command("package")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--target", "-t", help="Device class: a name of `edgekit targets`, or a .toml file of your own."
)
@click.option(
    "--backend",
    type=click.Choice(_BACKENDS),
    help="Engine of the package. With auto, each engine that runs here gets a package, and the fastest is"
    " kept. [default: auto, or the engine that the target prefers: on a GPU, or litert]",
)
@click.option(
    "--variants",
    type=click.IntRange(1, _MAX_VARIANTS),
    default=1,
    show_default=True,
    metavar="N",
    help="Include up to N variants of the model, of which the device runs one. Each variant meets every"
    " limit, and the whole package meets the limit on size.",
)
@click.option(
    "--also",
    type=click.Choice(_UNTIMED_KINDS),
    multiple=True,
    help="Also include a variant in this form, which needs cores that compute in half precision. An emulated"
    " Cortex-A76 computes its outputs and score, and only a tournament on the device shows its speed.",
)
@click.option(
    "--budget",
    "-b",
    default="",
    metavar="LIMITS",
    help="Limits that the package must meet together, such as"
    " size=10MB,latency=5ms,memory=64MB,energy=20mJ,drop=1%. A limit such as transport=2MB is on the bytes"
    " that are sent to the device. Unless given, size is 10MB and drop is 1%.",
)
@click.option(
    "--calibration",
    type=click.Path(path_type=Path),
    help="Samples for ranges: a folder of JPEG, PNG or WAV files, .npz, .npy, or a folder of these.",
)
@click.option(
    "--eval",
    "evaluation",
    type=click.Path(path_type=Path),
    help="Samples to judge by, with labels: class folders, boxes (YOLO, COCO, Pascal VOC), or `y` in .npz.",
)
@click.option(
    "--metric",
    default="auto",
    show_default=True,
    help="auto, top1, top5, map50_95, map50, miou, characters, auc, auc_steps, recall1, agreement, "
    "pixel_agreement, mask_overlap, detections, r2, sequence, similarity, or FILE.py:FUNCTION (your own "
    "code, run as you).",
)
@click.option(
    "--task",
    default="auto",
    show_default=True,
    metavar="NAME[:KEY=VALUE,...]",
    help="Task that says what the outputs mean, such as detection or classification:top=3"
    " (docs/reference/tasks.md). With auto, the package states a task only if the outputs leave no doubt,"
    " and with none it states no task.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Package a candidate only if the samples show that it meets the limit on the drop.",
)
@click.option(
    "--python",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Python of an environment of yours that exports MODEL, which is a TensorFlow SavedModel, a Keras"
    " file or a .pt2. The export is kept in the output folder.",
)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Repeat an earlier package with the same bytes. Without a search there are no candidates, and no"
    " report.",
)
@click.option(
    "--like",
    type=click.Path(path_type=Path),
    metavar="RECIPE",
    help="Keep the form and ranges of an earlier package and stay near its weights, so that the update is"
    " small for a model that was trained further. Pass the .recipe.json, which is beside the .edgepkg. The"
    " new package is judged as usual, but no other form is searched.",
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
@click.option(
    "--version",
    "version",
    help="Version of the package.  [default: 1.0.0, or the next patch that the folder does not hold]",
)
@click.option(
    "--power-mode",
    metavar="NAME",
    help="Power mode of the target to model latency and energy for.  [default: the one set out of the box]",
)
@click.option(
    "--batch", type=click.IntRange(1, _MAX_BATCH), help="Fix the batch size. [default: as in the model]"
)
@click.option(
    "--dim", "dims", multiple=True, metavar="NAME=SIZE", help="Size of a free dimension, for measuring."
)
@click.option(
    "--fix",
    "fixed",
    multiple=True,
    metavar="NAME=VALUE",
    help="Bind an input to a constant, such as sr=16000, and compute what follows from it. The constant is a"
    " number, or nested lists in JSON. Samples then do not contain this input.",
)
@click.option(
    "--state",
    "states",
    multiple=True,
    metavar="OUTPUT=INPUT",
    help="Output that is an input of the next run, such as hn=h0. The service keeps it for each sequence,"
    " and samples are sequences [N, steps, ...].",
)
@click.option(
    "--labels", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Class names, one a line."
)
@click.option(
    "--preprocessing",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE|imagenet",
    help="Preprocessing of a photograph or recording for the model, in JSON (docs/guide/samples.md). The"
    " package includes it.",
)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    help="Threads while judging. [default: the cores here, 4 at most]",
)
@click.option(
    "--search-seconds",
    "search_s",
    type=NumberRange(min=0),
    default=60.0,
    show_default=True,
    help="Limit of each search (ranges and mixed precisions; compressed forms), in seconds of a nominal"
    " processor.",
)
@click.option(
    "--key",
    default="default",
    show_default=True,
    help="Signing key of `edgekit keys`; the default one is made on first use.",
)
@click.option(
    "--encrypt-for",
    "device_keys",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="DEVICE.pub",
    help="Also write NAME.encrypted.edgepkg, which only the device with this key can open. The key is from"
    " `edgekit-device keys device`. May be repeated. MODEL may then be a package, which is encrypted as it"
    " is.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    model: Path,
    *,
    python: Path | None,
    recipe: Path | None,
    out: Path,
    key: str,
    device_keys: tuple[Path, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Package MODEL (.onnx, .tflite, .pt2) for a device within a budget, or a pipeline (.toml).

    hf:OWNER/NAME[:FILE] is a model in the cache of Hugging Face, and mlflow:FOLDER is a model saved by
    MLflow.

    The command optimises, quantizes and measures candidates, and chooses the fastest one within all limits.
    It writes a signed package with evidence, recipe and report, or fails and says which limit cannot be met.
    """
    if device_keys and model.suffix == ".edgepkg":
        _encrypt(model, out, device_keys)
        return
    _import_engines()
    from edgekit_cli.package_recipe import check_alone, repeat_recipe
    from edgekit_cli.package_request import command_line, find_source, read_request
    from edgekit_host.terminal import open_console

    console = open_console(stderr=as_json)  # with --json it shows only the progress bar
    source = find_source(model, None if recipe else python, out)
    model, options["name"] = source.path, options["name"] or source.name
    try:
        if model.suffix == ".toml":
            from edgekit_cli.package_pipeline import package_pipeline

            package_model = partial(_package_member, out, key, console)
            package = package_pipeline(ctx, model, console, package_model=package_model)
        elif recipe is None:
            request = read_request(model, options)
            document, written = _search(
                request, out, key, console, command_line(ctx), fixed_version=options["version"] is not None
            )
            _show(document, written, console, as_json=as_json)
            package = _find_package(document, out)
        else:
            check_alone(ctx)
            like, target = options["like"], options["target"]
            package = repeat_recipe(
                model, recipe, out, console, like=like, target=target, key=key, as_json=as_json
            )
        if device_keys:
            _encrypt(package, out, device_keys)
    except MemoryError as error:
        from edgekit_runtime.errors import EdgekitError

        raise EdgekitError(
            "not enough memory for inputs of this size; give a smaller --batch or --dim"
        ) from error


def _package_member(out: Path, key: str, console: Console, model: Path, arguments: list[str]) -> Path:
    """Package a model of a pipeline with these arguments, and return the path of its package."""
    from edgekit_cli.package_request import command_line, read_request

    with command.make_context("package", [str(model), *arguments]) as ctx:
        request, is_fixed = read_request(model, ctx.params), ctx.params["version"] is not None
        line = command_line(ctx)
    document, written = _search(request, out, key, console, line, fixed_version=is_fixed)
    _show(document, written, console, as_json=False)
    return _find_package(document, out)


def _encrypt(package: Path, out: Path, device_keys: tuple[Path, ...]) -> None:
    from edgekit_toolkit.pipeline.publish import publish_encrypted

    written = publish_encrypted(package, out, device_keys)
    devices = "1 device" if len(device_keys) == 1 else f"{len(device_keys)} devices"
    click.echo(f"encrypted for {devices}: {written}", err=True)  # a report may be on the standard output


def _find_package(document: Report, out: Path) -> Path:
    published = document["package"]
    assert published is not None  # noqa: S101  # for the type checker: else it was refused
    return out / published["file"]


def _import_engines() -> None:
    """Import the slow modules. Ctrl-C is delayed, because it crashes extension modules during import.

    OpenBLAS in Numpy uses one thread. With more threads they would wait in a busy loop, and sums would depend
    on their number.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    interrupts: list[int] = []
    in_main = threading.current_thread() is threading.main_thread()  # a handler can be set only there
    before = signal.getsignal(signal.SIGINT)
    if in_main:
        signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        import edgekit_host.terminal  # noqa: F401
        import edgekit_toolkit.report.builder  # noqa: F401
    finally:
        if in_main:
            signal.signal(signal.SIGINT, before)
    if interrupts:
        raise KeyboardInterrupt


def _search(
    request: Request, out: Path, key: str, console: Console, command_line: str, *, fixed_version: bool
) -> tuple[Report, list[Path]]:
    """Search for a package, write the results, and return the report and its files."""
    from edgekit_cli.progress import ProgressBar
    from edgekit_toolkit.measurement.measured_costs import take_measured_costs
    from edgekit_toolkit.packaging.next_version import find_free_version
    from edgekit_toolkit.packaging.signing_keys import load_signer
    from edgekit_toolkit.pipeline.engine_tournament import search_engines
    from edgekit_toolkit.pipeline.publish import output_folder
    from edgekit_toolkit.pipeline.search import search, with_measured_memory
    from edgekit_toolkit.pipeline.variants import carry_variants

    with output_folder(out):
        signer = load_signer(key)
        if not fixed_version:
            version = find_free_version(request.name, request.target.name, out)
            request = replace(request, version=version)
        with ProgressBar(console) as progress:
            request = replace(request, target=take_measured_costs(request.target))
            if request.backend == "auto" or request.thread_counts:
                run = search_engines(request, signer, progress.show)
            else:
                run = carry_variants([search(request, signer, progress.show)], signer, progress.show)
            if run.chosen is not None:
                progress.show("measuring memory in a fresh process")
                run = with_measured_memory(run, run.chosen)
            if not fixed_version:
                run = _with_last_version(run, out)
            progress.show("writing")
            return _write(run, out, signer, command_line)


def _with_last_version(run: Run, out: Path) -> Run:
    """Return the run with the previous version, if that package is in `out` and identical."""
    from edgekit_toolkit.packaging.next_version import FIRST_VERSION, under_last_version

    packaged = run.packaged
    if packaged is None or run.request.version == FIRST_VERSION:
        return run
    advice = under_last_version(packaged.recipe, packaged.package, out)
    if isinstance(advice, str):
        return replace(run, warnings=[*run.warnings, advice])
    recipe, package = advice
    return replace(
        run,
        request=replace(run.request, version=recipe.version),
        whole=replace(packaged, recipe=recipe, package=package),
    )


def _write(run: Run, out: Path, signer: StatementSigner, command_line: str) -> tuple[Report, list[Path]]:
    """Write the report, and the package if one was chosen."""
    from edgekit_toolkit.pipeline.publish import evidence_of, publish, staging
    from edgekit_toolkit.pipeline.sample_answers import compare_answers
    from edgekit_toolkit.report.builder import describe, evidence_figures
    from edgekit_toolkit.report.document import finite_report
    from edgekit_toolkit.report.files import write_report

    request, published = run.request, None
    with staging(out) as stage:
        if run.chosen is not None and run.packaged is not None:
            evidence = evidence_of(evidence_figures(run, run.chosen))
            published = publish(run.packaged.package, run.packaged.recipe, evidence, stage, signer)
        samples = compare_answers(run)
        document = finite_report(describe(run, command_line, published, samples))
        stem = f"{request.name}-{request.version}-{request.target.name}"
        written = write_report(document, stage, stem, [sample.picture for sample in samples])
    return document, [out / path.name for path in written]


def _show(document: Report, written: list[Path], console: Console, *, as_json: bool) -> None:
    """Print the outcome.

    Raises:
        BudgetError: No candidate meets all limits.
    """
    import json

    from edgekit_runtime.errors import BudgetError
    from edgekit_toolkit.report.terminal import print_summary

    outcome = document["outcome"]
    if not as_json:
        print_summary(document, console, written)
    elif outcome["chosen"] is not None:
        click.echo(json.dumps(document))
    if outcome["chosen"] is None:
        raise BudgetError(
            f"{outcome['reason']}. To package: {outcome['needed']}. Report: {written[0]}",
            binding=tuple(outcome["binding"]),
            closest=outcome["closest"],
            needed=outcome["needed"],
            report=str(written[1]),
        )
