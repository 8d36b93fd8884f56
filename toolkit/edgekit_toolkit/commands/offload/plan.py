"""`edgekit offload plan`: find the best ways to run a model between device and server, and package them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

if TYPE_CHECKING:
    from edgekit_offload.planning.planner import PlanInputs
    from edgekit_offload.planning.result import PlanningResult
    from edgekit_offload.profiling.model_profile import ModelProfile
    from edgekit_runtime.tensors import Array
    from edgekit_toolkit.commands.progress import ProgressBar

_POINTS: Final = 9  # of a range of bandwidths
_MAX_POINTS: Final = 64
_RANGE = re.compile(r"([0-9.]+)\.\.([0-9.]+)")
_EDGE_LINK = re.compile(r"([0-9.]+)@([0-9.]+)")
_BYTES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SIZE = re.compile(rf"([0-9.]+)\s*({'|'.join(_BYTES)})")
_ENDINGS: Final = (".json", ".html")


@click.command("plan")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--device", required=True, metavar="PROFILE|MACHINE",
    help="A profile of `edgekit offload profile`, or a machine to profile now: local, local@20%, ssh:HOST.",
)  # fmt: skip
@click.option(
    "--server", required=True, metavar="PROFILE|MACHINE|URL",
    help="The same of the server, or the URL of a server that serves this model.",
)  # fmt: skip
@click.option(
    "--bandwidth", default="1..100", show_default=True, metavar="MBIT/S",
    help="Range A..B in logarithmic steps, or values such as 2,10,50.",
)  # fmt: skip
@click.option("--rtt", default="20", show_default=True, metavar="MS", help="Round trips, such as 5,20,80.")
@click.option(
    "--samples", type=click.Path(path_type=Path), required=True,
    help="Samples as `edgekit package` takes them: the bytes of what is sent depend on them.",
)  # fmt: skip
@click.option(
    "--objective", type=click.Choice(["latency", "energy", "throughput", "capacity"]), default="latency",
    show_default=True, help="What is minimised; capacity: time of the server within --latency-limit.",
)  # fmt: skip
@click.option("--latency-limit", type=click.FloatRange(min=0, min_open=True), metavar="MS",
              help="Of 99 % of requests, for --objective capacity.")  # fmt: skip
@click.option("--requests-per-s", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True,
              help="Of each device, for --objective capacity.")  # fmt: skip
@click.option(
    "--power", metavar="COMPUTE,RADIO",
    help="Watts above idle while the device computes, and while its radio is on, for --objective energy.",
)  # fmt: skip
@click.option(
    "--keep-on-device", multiple=True, metavar="TENSOR|input",
    help="A tensor that must not be sent. That is residency, not secrecy: what is sent may reveal it.",
)  # fmt: skip
@click.option("--max-leak", type=float, metavar="DB",
              help="Refuse ways whose measured leakage (PSNR, a lower bound) is higher.")  # fmt: skip
@click.option("--memory", metavar="SIZE", help="Weights and activations on the device, such as 64MB.")
@click.option("--tiers", type=click.IntRange(2, 3), default=2, show_default=True,
              help="3: a machine at the edge between device and server.")  # fmt: skip
@click.option("--edge", metavar="PROFILE|MACHINE", help="The machine at the edge, for --tiers 3.")
@click.option("--edge-link", default="100@10", show_default=True, metavar="MBIT/S@MS",
              help="Link from edge to server, for --tiers 3.")  # fmt: skip
@click.option(
    "--output", "-o", type=click.Path(path_type=Path), default=Path("plans"), show_default=True,
    help="Folder for the plan as HTML and JSON.",
)  # fmt: skip
@click.option("--seconds", type=click.FloatRange(min=0.1), default=10.0, show_default=True,
              help="How long each machine measures.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def command(model: Path, *, output: Path, as_json: bool, **options: Any) -> None:
    """Compare every way to run MODEL (.onnx or .edgepkg) between a device and a server.

    All on the device, the input sent raw or in the fair codec of its kind, and the best cuts, each over a
    range of bandwidths: as a table, a page, and JSON.
    """
    import json

    from edgekit_offload.planning.planner import plan
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_toolkit.commands.offload.plan_table import print_plan
    from edgekit_toolkit.commands.progress import ProgressBar
    from edgekit_toolkit.console import open_console

    console = open_console(stderr=as_json)
    with ProgressBar(console) as progress:
        inputs = _read_inputs(model, options, progress)
        result = plan(inputs, progress.show)
        progress.show("writing")
        written = _write(result, output, model.name.removesuffix(model.suffix))
    if as_json:
        click.echo(json.dumps(to_plain(result)))
    else:
        print_plan(result, console, written)


def parse_bandwidths(text: str) -> tuple[float, ...]:
    """Return the bandwidths that `--bandwidth` names, Mbit/s, in order.

    Raises:
        click.BadParameter: neither a range nor values above 0.
    """
    if match := _RANGE.fullmatch(text.strip()):
        import numpy as np

        low, high = _number(match[1], "--bandwidth"), _number(match[2], "--bandwidth")
        if 0 < low <= high:
            return tuple(sorted({float(f"{one:.3g}") for one in np.geomspace(low, high, _POINTS)}))
        raise click.BadParameter(
            f"{text!r}: expected A..B with 0 < A <= B; over a link of 0 nothing can be sent",
            param_hint="--bandwidth",
        )
    return parse_numbers(text, "--bandwidth")


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Return numbers above 0 that commas separate, in order.

    Raises:
        click.BadParameter: something else.
    """
    values = sorted({_number(part, option) for part in text.split(",")})
    if values[0] <= 0 or len(values) > _MAX_POINTS:
        raise click.BadParameter(f"{text!r}: expected 1 to {_MAX_POINTS} numbers above 0", param_hint=option)
    return tuple(values)


def _number(text: str, option: str) -> float:
    try:
        value = float(text)
    except ValueError as cause:
        raise click.BadParameter(f"{text!r} is no number", param_hint=option) from cause
    if not 0 <= value < 1e6:
        raise click.BadParameter(f"{text!r}: expected 0 to a million", param_hint=option)
    return value


def _read_inputs(model: Path, options: dict[str, Any], progress: ProgressBar) -> PlanInputs:
    """Return what is planned: profiles that are read or measured, and samples."""
    from edgekit_offload.planning.costs import PowerModel
    from edgekit_offload.planning.envelope import Grid
    from edgekit_offload.planning.planner import PlanInputs
    from edgekit_runtime.remote.latency_model import LinkState

    name, content = _read_model(model)
    grid = Grid(parse_bandwidths(options["bandwidth"]), parse_numbers(options["rtt"], "--rtt"))
    power = None
    if options["power"] is not None:
        watts = parse_watts(options["power"])
        power = PowerModel(*watts)
    memory = None if options["memory"] is None else parse_bytes(options["memory"])
    edge, edge_link = None, None
    if options["tiers"] > 2:
        if options["edge"] is None:
            raise click.UsageError("--tiers 3 needs the machine between device and server: --edge")
        match = _EDGE_LINK.fullmatch(options["edge_link"])
        if match is None:
            raise click.BadParameter("expected MBIT/S@MS, such as 100@10", param_hint="--edge-link")
        bits_per_s, rtt_s = _number(match[1], "--edge-link") * 1e6, _number(match[2], "--edge-link") / 1e3
        edge_link = LinkState(bits_per_s, bits_per_s, rtt_s)
        edge = _profile(options["edge"], name, content, options["seconds"], progress)
    feeds = _read_samples(model, content, options["samples"])
    limit_ms, most_db = options["latency_limit"], options["max_leak"]
    return PlanInputs(
        name, content,
        _profile(options["device"], name, content, options["seconds"], progress),
        _profile(options["server"], name, content, options["seconds"], progress),
        grid, feeds, options["objective"], power, None if limit_ms is None else limit_ms / 1e3,
        options["requests_per_s"], memory, tuple(options["keep_on_device"]), edge, edge_link,
        most_leakage_db=most_db,
    )  # fmt: skip


def parse_watts(text: str) -> tuple[float, float]:
    """Return the two numbers of `--power`.

    Raises:
        click.BadParameter: something else.
    """
    parts = [_number(part, "--power") for part in text.split(",")]
    if len(parts) != 2:
        raise click.BadParameter(
            f"{text!r}: expected COMPUTE,RADIO in watts, such as 4,1", param_hint="--power"
        )
    return parts[0], parts[1]


def parse_bytes(text: str) -> float:
    """Return the number of bytes that `--memory` names.

    Raises:
        click.BadParameter: something else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a size such as 64MB", param_hint="--memory")
    return _number(match[1], "--memory") * _BYTES[match[2]]


def _read_model(path: Path) -> tuple[str, bytes]:
    """Return name and content of a model, or of the default model of a verified package.

    Raises:
        ModelError: there is no such file.
        PackageError: the package cannot be trusted, or does not hold an ONNX model.
    """
    from edgekit_runtime.errors import ModelError, PackageError
    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore

    if path.suffix != ".edgepkg":
        try:
            return path.stem, path.read_bytes()
        except OSError as cause:
            raise ModelError(f"{path}: {cause.strerror}") from cause
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        backend = package.manifest.backend
        if not backend.artifact.endswith(".onnx"):
            raise PackageError(f"{path}: its model '{backend.artifact}' is not ONNX, so it cannot be planned")
        return package.manifest.name, bytes(package.read(backend.artifact))


def _profile(text: str, name: str, content: bytes, seconds: float, progress: ProgressBar) -> ModelProfile:
    """Return the profile in a file, or measure one on a machine."""
    from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
    from edgekit_offload.profiling.model_profile import read_profile

    if text.endswith(".json") or Path(text).is_file():
        return read_profile(Path(text))
    machine = Machine.parse(text)
    progress.show(f"profiling on {text}")
    return profile_kernels(machine, RunnableGraph(content), name=name, seconds=seconds)


def _read_samples(model: Path, content: bytes, path: Path) -> list[dict[str, Array]]:
    """Return samples, one request each."""
    from itertools import islice

    import onnx

    from edgekit_offload.planning.planner import MAX_SAMPLES
    from edgekit_runtime.package.archive import read_package
    from edgekit_runtime.system.paths import find_keys_folder
    from edgekit_runtime.trust.trust_store import TrustStore
    from edgekit_toolkit.evaluation.batch_inference import package_decoding
    from edgekit_toolkit.onnx_graph.specs import tensor_specs
    from edgekit_toolkit.samples.source import open_data

    specs, _ = tensor_specs(onnx.load_from_string(content))
    decoding = None
    if model.suffix == ".edgepkg":
        with read_package(model, TrustStore.from_folder(find_keys_folder())) as package:
            decoding = package_decoding(package)
    source = open_data(path, specs, decoding=decoding)
    return [dict(feeds) for feeds, _ in islice(source.stream(1), MAX_SAMPLES)]


def _write(result: PlanningResult, folder: Path, name: str) -> list[Path]:
    """Write the plan as JSON and as a page.

    Raises:
        OutputError: the folder cannot be written.
    """
    import json

    from edgekit_offload.report.plan_page import render_plan_page
    from edgekit_runtime.dataclass_json import to_plain
    from edgekit_runtime.errors import OutputError
    from edgekit_runtime.system.atomic_files import write_atomically

    texts = (json.dumps(to_plain(result), indent=1) + "\n", render_plan_page(result))
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise OutputError(f"{folder}: {cause.strerror}; choose another folder by --output") from cause
    for ending, text in zip(_ENDINGS, texts, strict=True):
        path = folder / f"{name}.plan{ending}"
        with write_atomically(path) as file:
            file.write(text.encode())
        written.append(path)
    return written
