"""`edgekit offload plan`: finds and packages the best ways to run a model on a device and a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from edgekit_cli.number_range import NumberRange
from edgekit_cli.offload import insecure_option
from edgekit_runtime.offload.objectives import OBJECTIVES

if TYPE_CHECKING:
    from edgekit_offload.planning.result import PlanningResult

_ENDINGS: Final = (".json", ".html")
_NO_PACKAGE: Final = (
    "No package was written: {model} is a model. Plan its package to have one: edgekit package {model},"
    " then edgekit offload plan packages/*.edgepkg"
)


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--device",
    required=True,
    metavar="PROFILE|MACHINE",
    help="Profile from `edgekit offload profile`, or a machine to profile now: local, local@20% or ssh:HOST.",
)
@click.option(
    "--server",
    required=True,
    metavar="PROFILE|MACHINE|URL",
    help="Profile or machine of the server, or http(s)://HOST:PORT of a server that serves the whole model"
    " under its name.",
)
@click.option(
    "--token-file", type=click.Path(path_type=Path), help="File with the token of the server at URL."
)
@click.option(
    "--ca-file", metavar="PEM", help="File of the authority that signed the certificate of the server at URL."
)
@insecure_option
@click.option(
    "--bandwidth",
    default="1..100",
    show_default=True,
    metavar="MBIT/S",
    help="Bandwidths as a range A..B in logarithmic steps, or as values such as 2,10,50.",
)
@click.option(
    "--rtt", default="20", show_default=True, metavar="MS", help="Round-trip times, such as 5,20,80."
)
@click.option(
    "--samples",
    type=click.Path(path_type=Path),
    help="Samples, as for `edgekit package`. They determine the sent bytes and the loss of codings. The"
    " coding int8 needs at least 16 samples, and lossier codings need 100.  [default: the golden inputs of a"
    " package, or generated inputs, with exact codings only]",
)
@click.option(
    "--objective",
    type=click.Choice([*OBJECTIVES]),
    default="latency",
    show_default=True,
    help="What to optimise. With capacity, it is the number of devices per server within --latency-limit.",
)
@click.option(
    "--latency-limit",
    type=NumberRange(0, 3_600_000, min_open=True),
    metavar="MS",
    help="Latency limit. With --objective capacity, 99 % of requests must meet it, and with energy a single"
    " request.",
)
@click.option(
    "--requests-per-s",
    type=NumberRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="Request rate of each device, for --objective capacity.",
)
@click.option(
    "--power",
    metavar="COMPUTE,RADIO",
    help="Watts above idle while the device computes, and while its radio is on, for --objective energy.",
)
@click.option(
    "--keep-on-device",
    multiple=True,
    metavar="TENSOR|input",
    help="Tensor that must not be sent, not even moved, recoded or scaled. Other tensors that are sent may"
    " still reveal its values.",
)
@click.option(
    "--max-leak",
    type=NumberRange(),
    metavar="DB",
    help="Refuse candidates whose measured leakage (PSNR, a lower bound) is higher. Needs 1,000 samples.",
)
@click.option(
    "--max-loss",
    default="0.1%",
    show_default=True,
    metavar="PERCENT",
    help="Share of the answers that a coding may make wrong, estimated on samples, with a standard error."
    " 100% also allows codings whose share is unknown.",
)
@click.option(
    "--classes",
    multiple=True,
    metavar="OUTPUT",
    help="Output with class scores, which shows the answers that a coding changes.  [default: the outputs"
    " that the package states, and outputs with probabilities]",
)
@click.option(
    "--sample-rate",
    type=NumberRange(min=0, min_open=True),
    metavar="HZ",
    help="Sample rate of sound, for Opus.  [default: that of the package's preprocessing, or 16000]",
)
@click.option(
    "--cascade",
    metavar="SMALL_MODEL",
    type=click.Path(path_type=Path),
    help="Small classifier for the device, which answers a request itself if it is sure.",
)
@click.option(
    "--agreement",
    type=NumberRange(0, 1, min_open=True, max_open=True),
    default=0.95,
    show_default=True,
    help="Share of a cascade's answers that must be equal to those of MODEL.",
)
@click.option(
    "--memory", metavar="SIZE", help="Limit of weights and activations on the device, such as 64MB."
)
@click.option("--weights", metavar="SIZE", help="Limit of the weights alone on the device, such as 8MB.")
@click.option(
    "--tiers",
    type=click.IntRange(2, 3),
    default=2,
    show_default=True,
    help="Number of machines. 3 adds a machine at the edge between device and server.",
)
@click.option("--edge", metavar="PROFILE|MACHINE", help="The machine at the edge, for --tiers 3.")
@click.option(
    "--edge-link",
    default="100@10",
    show_default=True,
    metavar="MBIT/S@MS",
    help="Link from edge to server, for --tiers 3.",
)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("plans"),
    show_default=True,
    help="Folder for the plan as HTML and JSON, and for the package that carries it.",
)
@click.option("--key", default="default", show_default=True, help="Signing key of `edgekit keys`.")
@click.option(
    "--seconds",
    type=NumberRange(min=0.1),
    default=10.0,
    show_default=True,
    help="Time limit of a measurement. It ends earlier at a standard error of 1 %.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(model: Path, *, output: Path, as_json: bool, key: str, **options: Any) -> None:
    """Compare the ways to run MODEL (.onnx or .edgepkg) on a device and a server.

    The candidates are the whole model on the device, the whole model on the server with uncompressed or
    compressed inputs, and the best cuts of the model. They are compared for a range of bandwidths. The
    command writes a table, a page, and JSON.
    For an .edgepkg planned on two machines it also writes a new package with the plans and their submodels.
    """
    import json

    from edgekit_cli.offload.plan_request import PlanRequest, read_inputs
    from edgekit_cli.offload.plan_table import print_plan
    from edgekit_cli.progress import ProgressBar
    from edgekit_host.terminal import open_console
    from edgekit_offload.packaging.plan_package import (
        EDGE_FOLDER,
        TieredMeasurement,
        add_cascade,
        attach,
        attach_tails,
        with_warning,
    )
    from edgekit_offload.planning.planner import plan
    from edgekit_runtime.dataclass_json import to_plain

    _make_folder(output)
    console = open_console(stderr=as_json)
    with ProgressBar(console) as progress:
        inputs = read_inputs(PlanRequest.parse(model, options), progress)
        result = plan(inputs, progress.show)
        progress.show("writing")
        written = _write(result, output, model.name.removesuffix(model.suffix))
        if model.suffix == ".edgepkg" and inputs.measure is not None:
            splits = add_cascade(result, inputs)
            written.append(attach(model, result, splits, output, key))
            if isinstance(inputs.measure, TieredMeasurement):
                written += attach_tails(written[-1], result, inputs.measure.tails, output / EDGE_FOLDER, key)
            left_out = [plan.name for plan in result.table.plans if plan.tail and plan.name not in splits]
            result = with_warning(result, left_out)
    if as_json:
        click.echo(json.dumps(to_plain(result)))
    else:
        print_plan(result, console, written)
        if model.suffix != ".edgepkg":
            console.print(_NO_PACKAGE.format(model=model))
        elif inputs.measure is None:
            console.print("No package was written: no cut was measured. Name two machines to have one.")


def _make_folder(folder: Path) -> None:
    """Create the folder of the plan before the measurements, which take minutes.

    Raises:
        OutputError: The folder cannot be written.
    """
    from edgekit_runtime.errors import OutputError
    from edgekit_runtime.system.atomic_files import check_target

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(f"{folder}: {cause.strerror}; choose another folder by --output") from cause
    check_target(folder / "plan")


def _write(result: PlanningResult, folder: Path, name: str) -> list[Path]:
    import json

    from edgekit_offload.report.plan_page import render_plan_page
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.system.atomic_files import write_text_atomically

    texts = (json.dumps(to_plain(result), indent=1) + "\n", render_plan_page(result))
    written = []
    for ending, text in zip(_ENDINGS, texts, strict=True):
        path = folder / f"{name}.plan{ending}"
        write_text_atomically(path, text)
        written.append(path)
    return written
