"""`edgekit offload profile`: measures the kernels of a model on a machine, and optionally a link."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekit_cli.number_range import NumberRange
from edgekit_cli.offload import insecure_option
from edgekit_cli.shared_options import as_json_option

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

    from edgekit_offload.profiling.model_profile import KernelTime, ModelProfile
    from edgekit_runtime.offload.measurement.link_probe import LinkProbe

_MAX_KERNELS = 10  # kernels
_NAME_CHARS = 30  # characters of a name. Converters join several, and a row should fit into a line
_LEAST_SCALE, _MOST_SCALE = 0.8, 1.25  # how much kernel times may be scaled so that their sum is a whole run
_UNSTEADY = 0.25  # distance of the quartiles, as a share of the median


@click.command("profile")
@click.argument("file", metavar="MODEL|PACKAGE", type=click.Path(path_type=Path))
@click.option(
    "--on",
    "on",
    metavar="MACHINE",
    default="local",
    show_default=True,
    help="Measure here: 'local', 'local@20%' (slowed down, needs root), or 'ssh:HOST'.",
)
@click.option("--server", metavar="URL", help="Measure the link from here to this server as well.")
@click.option("--token-file", type=click.Path(path_type=Path), help="File with the server's token.")
@click.option("--ca-file", metavar="PEM", help="File of the authority that signed the server's certificate.")
@insecure_option
@click.option(
    "--seconds",
    type=NumberRange(0.1, 3600),
    default=10.0,
    show_default=True,
    help="Time limit of a measurement. It ends earlier at a standard error of 1 %.",
)
@click.option(
    "--output", type=click.Path(path_type=Path), help="File to write.  [default: NAME.MACHINE.profile.json]"
)
@as_json_option
def command(file: Path, *, on: str, server: str | None, as_json: bool, **options: Any) -> None:
    """Measure the kernels of an ONNX file (MODEL), or of the model in a package (PACKAGE).

    `edgekit offload plan` reads the file that this command writes. The model in a PACKAGE runs with the
    session options in the package. Kernels are the fused nodes that onnxruntime executes.

    A machine named 'ssh:HOST' needs `edgekit[onnx]` installed, and a login without a password.
    """
    import json

    from edgekit_cli.offload.source import read_named_model
    from edgekit_cli.progress import ProgressBar
    from edgekit_host.terminal import open_console
    from edgekit_offload.profiling.machine import Machine, profile_kernels
    from edgekit_offload.profiling.model_profile import write_profile
    from edgekit_runtime.offload.measurement.link_probe import probe_link
    from edgekit_runtime.offload.offload_options import read_token
    from edgekit_runtime.system.atomic_files import check_target

    machine, model = Machine.parse(on), read_named_model(file)
    output = options["output"] or Path(f"{model.name}.{_machine_name(on)}.profile.json")
    check_target(output)
    link = None
    with ProgressBar(open_console(stderr=True)) as progress:
        if server is not None:
            progress.show(f"probing {server}")
            token_file = options["token_file"]
            token = None if token_file is None else read_token(token_file)
            link = probe_link(server, token=token, ca_file=options["ca_file"], insecure=options["insecure"])
        progress.show(f"measuring {model.name} on {on}, about {options['seconds']:.0f} s")
        profile = profile_kernels(machine, model.graph, name=model.name, seconds=options["seconds"])
    write_profile(output, profile)
    cuts = _count_cuts(model.graph.content, profile)
    if as_json:
        click.echo(json.dumps(_describe(output, profile, cuts, link), indent=2))
    else:
        _show(open_console(), output, profile, cuts, link)


def _machine_name(text: str) -> str:
    """Return the name of a machine for file names, such as `local-20` for `local@20%`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", text).strip("-")


def _count_cuts(content: bytes, profile: ModelProfile) -> int:
    """Return the number of tensors after which the model can be cut, without inputs and outputs."""
    from edgekit_offload.profiling.planning_graph import join_profiles

    if profile.obstacle:
        return 0
    graph = join_profiles(content, [profile]).graph
    return len(set(graph.tensors) - set(graph.inputs) - set(graph.outputs))


def _describe(output: Path, profile: ModelProfile, cuts: int, link: LinkProbe | None) -> dict[str, Any]:
    from edgekit_runtime.dataclass_json import to_plain

    return {
        "profile": str(output),
        "model": profile.model,
        "measured_on": profile.measured_on,
        "machine": to_plain(profile.machine),
        "label": profile.label,
        "whole_s": profile.whole_s,
        "whole_spread": profile.whole_spread,
        "scale": profile.scale,
        "overhead_s": profile.overhead_s,
        "request": to_plain(profile.request),
        "kernels": len(profile.kernels),
        "cut_points": cuts,
        "obstacle": profile.obstacle,
        "link": None if link is None else to_plain(link),
    }


def _show(console: Console, output: Path, profile: ModelProfile, cuts: int, link: LinkProbe | None) -> None:
    from edgekit_host.terminal import print_line, print_section

    print_line(console, (f"{profile.model} on {profile.measured_on}", "bold"), f"({profile.description})")
    whole = f"{profile.whole_s * 1e3:.3f} ms"
    print_section(
        console, "Whole run", [(profile.label, whole, f"quartiles {profile.whole_spread:.0%} apart")]
    )
    if profile.obstacle:
        console.print()
        print_line(
            console, ("Cannot be split:", "yellow"), f"{profile.obstacle}; whole-model candidates only."
        )
    else:
        slowest = sorted(profile.kernels, key=lambda kernel: -kernel.seconds)[:_MAX_KERNELS]
        title = f"Kernels: {len(profile.kernels)}, the slowest"
        print_section(console, title, [_row(kernel, profile) for kernel in slowest])
        print_section(console, "Cuts", [("tensors behind which it can be cut", f"{cuts}")])
    request = profile.request
    cost = f"{request.fixed_s * 1e3:.2f} ms, and {request.byte_s * 1e9:.1f} ms for each MB"
    print_section(console, "A request to another machine, beside link and model", [("takes here", cost)])
    if link is not None:
        print_section(console, f"Link to {link.server}", _link_rows(link))
    console.print()
    for warning in _warnings(profile):
        print_line(console, ("Note:", "yellow"), warning, indent=6)
    print_line(console, "Profile:", output, indent=9)


def _row(kernel: KernelTime, profile: ModelProfile) -> tuple[str, ...]:
    name = kernel.writes[0] if kernel.writes else kernel.name
    size_bytes = sum(profile.tensors.get(tensor, 0) for tensor in kernel.writes)
    return (
        f"{kernel.seconds / profile.whole_s:5.1%}",
        f"{kernel.seconds * 1e3:9.4f} ms",
        kernel.op,
        f"{size_bytes / 1e3:8.1f} kB",
        name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…",
    )


def _link_rows(link: LinkProbe) -> Iterator[tuple[str, str]]:
    yield "round trip", f"{link.rtt_s * 1e3:.1f} ms"
    yield "upload", f"{link.up_bits_per_s / 1e6:.2f} Mbit/s"
    down = link.down_bits_per_s
    yield "download", "not measured" if down is None else f"at least {down / 1e6:.2f} Mbit/s"


def _warnings(profile: ModelProfile) -> Iterator[str]:
    machine = profile.machine
    if profile.whole_spread > _UNSTEADY and profile.label == "measured":
        yield "the runs vary much; something else uses this machine. Measure again at rest."
    if machine.load is not None and machine.load > machine.cores:
        yield f"the load average was {machine.load:.1f} on {machine.cores} cores. Measure again at rest."
    if profile.kernels and machine.gpu:
        yield (
            "the whole run is the GPU's, the shares of its kernels are the processor's, so they are rough."
            " Planning measures the tails of the best plans on the GPU."
        )
        return
    if profile.kernels and profile.scale < _LEAST_SCALE:
        yield f"profiling took {1 / profile.scale:.2f} times the plain run: the shares of kernels are rough."
    if profile.scale > _MOST_SCALE:
        yield (
            f"{1 - 1 / profile.scale:.0%} of the run pass beside its kernels, and are spread over them:"
            " such a short model gains little from a split."
        )
