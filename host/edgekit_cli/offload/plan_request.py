"""Reads the options of `edgekit offload plan`: profiles (from files or measured), samples, limits."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import onnx

from edgekit_cli.offload.source import MAX_SAMPLES, read_samples, read_whole_model
from edgekit_cli.progress import ProgressBar
from edgekit_offload.packaging.plan_package import TieredCuts
from edgekit_offload.planning.cascade import CascadeInputs
from edgekit_offload.planning.codings import run_seconds
from edgekit_offload.planning.costs import PowerModel
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.leakage import LEAST_FOR_LIMIT
from edgekit_offload.planning.leakage import MAX_SAMPLES as MAX_ATTACKED
from edgekit_offload.planning.planner import LOSSY_SAMPLES, PlanInputs
from edgekit_offload.planning.probed_server import check_server, is_url, probe_server
from edgekit_offload.planning.realise import MeasuredCuts, leakage_of
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.model_profile import ModelProfile, read_profile
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import LinkState
from edgekit_runtime.tensors import Array
from edgekit_toolkit.openings.model_opening import check_opening

_LEAKAGE_LIMIT_S: Final = 8.0  # time of all attacks, unless a limit on leakage is given
_LEAST_ATTACKED: Final = 40  # with fewer samples, leakage is measured on request only
_ANSWERS_S: Final = 1.0  # time of whole-model runs in which each way answers samples
_POINTS: Final = 9  # points of a range of bandwidths
_MAX_POINTS: Final = 64
_RANGE = re.compile(r"([0-9.]+)\.\.([0-9.]+)")
_EDGE_LINK = re.compile(r"([0-9.]+)@([0-9.]+)")
_BYTES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SIZE = re.compile(rf"([0-9.]+)\s*({'|'.join(_BYTES)})")


def parse_bandwidths(text: str) -> tuple[float, ...]:
    """Return the bandwidths that `--bandwidth` names, Mbit/s, in order.

    Raises:
        click.BadParameter: neither a range nor values above 0.
    """
    if match := _RANGE.fullmatch(text.strip()):
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
        expected = "a range A..B or numbers such as 2,10,50" if option == "--bandwidth" else "a number"
        raise click.BadParameter(f"{text!r}: expected {expected}", param_hint=option) from cause
    if not 0 <= value < 1e6:
        raise click.BadParameter(f"{text!r}: expected 0 to a million", param_hint=option)
    return value


def read_inputs(model: Path, options: Mapping[str, Any], progress: ProgressBar) -> PlanInputs:
    """Return the inputs of a plan: profiles, read from files or measured, and samples."""
    name, graph, stated, stated_hz = read_whole_model(model)
    content = graph.content
    classes = stated | _check_classes(content, options["classes"])
    grid = Grid(parse_bandwidths(options["bandwidth"]), parse_numbers(options["rtt"], "--rtt"))
    by_url = is_url(options["server"])
    if options["tiers"] > 2 and by_url:
        raise click.UsageError("--tiers 3 needs a profile or a machine as --server, not a URL")
    if options["tiers"] > 2 and options["objective"] != "latency":
        raise click.UsageError("--tiers 3 places kernels for the least latency: leave --objective out")
    for option in ("--device", "--server", "--edge"):  # before anything is measured
        _check_machine(options[option[2:]], option)
    if by_url:
        check_server(name, options)
    power = None
    if options["power"] is not None:
        watts = parse_watts(options["power"])
        power = PowerModel(*watts)
    memory, weights = (
        None if options[limit] is None else parse_bytes(options[limit], f"--{limit}")
        for limit in ("memory", "weights")
    )
    edge_link = None
    if options["edge"] is not None and options["tiers"] == 2:
        raise click.UsageError("--edge needs --tiers 3")
    if options["tiers"] > 2:
        if options["edge"] is None:
            raise click.UsageError("--tiers 3 needs the machine between device and server: --edge")
        match = _EDGE_LINK.fullmatch(options["edge_link"])
        if match is None:
            raise click.BadParameter("expected MBIT/S@MS, such as 100@10", param_hint="--edge-link")
        bits_per_s, rtt_s = _number(match[1], "--edge-link") * 1e6, _number(match[2], "--edge-link") / 1e3
        edge_link = LinkState(bits_per_s, bits_per_s, rtt_s)
    limit_ms, most_db = options["latency_limit"], options["max_leak"]
    at_most, least = (MAX_SAMPLES,) * 2 if most_db is None else (MAX_ATTACKED, LEAST_FOR_LIMIT)
    samples, notes = read_samples(model, content, options["samples"], at_most, least)
    check_opening("ort", content, graph.options, samples[0])
    feeds = samples[: min(_count_answers(content, samples), MAX_SAMPLES)]
    if most_db is not None and len(samples) < LEAST_FOR_LIMIT:
        found = f"there are {len(samples)}" if options["samples"] else "there are none"
        raise CutError(
            f"--max-leak needs at least {LEAST_FOR_LIMIT:,} distinct samples, {found}: with fewer, the"
            " attacker learns too little, and what leaks seems to keep the limit; give more by --samples"
        )
    leakage = None
    if most_db is not None:
        leakage = leakage_of(content, samples)
    elif len(samples) >= _LEAST_ATTACKED:
        leakage = leakage_of(content, samples, limit_s=_LEAKAGE_LIMIT_S)
    ends = (options["device"], "local" if by_url else options["server"], options["edge"])
    profiles = {  # a machine that is both ends is measured once
        text: _profile(text, name, graph, options["seconds"], progress)
        for text in dict.fromkeys(ends)
        if text is not None
    }
    device, server, edge = profiles[ends[0]], profiles[ends[1]], profiles.get(ends[2])
    if by_url:
        progress.show(f"measuring {options['server']}")
        probed = probe_server(server, feeds[0], options)
        server, notes, grid = probed.profile, (*notes, probed.note), _add_link(grid, probed.link.state)
    return PlanInputs(
        name, content, device, server,
        grid, feeds, options["objective"], power, None if limit_ms is None else limit_ms / 1e3,
        options["requests_per_s"], memory, weights, tuple(options["keep_on_device"]), edge, edge_link,
        realise=_measured_cuts(graph, feeds, options, edge_link, (device, edge or server, server), classes),
        most_leakage_db=most_db, leakage=leakage, notes=notes, is_server_modelled=by_url,
        cascade=_read_cascade(options, samples, classes),
        max_loss=parse_percent(options["max_loss"], "--max-loss"),
        sample_rate_hz=options["sample_rate"] or stated_hz, has_samples=options["samples"] is not None,
    )  # fmt: skip


def _check_classes(content: bytes, named: Sequence[str]) -> frozenset[str]:
    """Return the outputs that `--classes` names.

    Raises:
        click.BadParameter: the model has no such output.
    """
    known = [one.name for one in onnx.load_from_string(content).graph.output]
    if unknown := set(named) - set(known):
        raise click.BadParameter(
            f"{min(unknown)!r}: the model has the outputs {', '.join(known)}", param_hint="--classes"
        )
    return frozenset(named)


def _count_answers(content: bytes, samples: list[dict[str, Array]]) -> int:
    """Return how many samples each way answers: what shows its loss, and more where the model is fast."""
    return max(LOSSY_SAMPLES, int(_ANSWERS_S / max(run_seconds(content, samples[0]), 1e-6)))


def _read_cascade(
    options: Mapping[str, Any], samples: list[dict[str, Array]], classes: frozenset[str]
) -> CascadeInputs | None:
    path: Path | None = options["cascade"]
    if path is None:
        return None
    return CascadeInputs(read_whole_model(path).graph.content, options["agreement"], samples, classes)


def _add_link(grid: Grid, link: LinkState) -> Grid:
    """Return a grid with the present setting of a link added."""
    bandwidths = {*grid.bandwidths_mbit_s, float(f"{link.up_bits_per_s / 1e6:.3g}")}
    return Grid(tuple(sorted(bandwidths)), tuple(sorted({*grid.rtts_ms, float(f"{link.rtt_s * 1e3:.3g}")})))


def _measured_cuts(
    graph: RunnableGraph,
    feeds: list[dict[str, Array]],
    options: Mapping[str, Any],
    edge_link: LinkState | None,
    profiles: tuple[ModelProfile, ModelProfile, ModelProfile],
    classes: frozenset[str],
) -> MeasuredCuts | TieredCuts | None:
    """Return the measurement of real cuts if all machines are available, and not only their profiles."""
    device, server, edge = options["device"], options["server"], options["edge"]
    if is_url(server) or any(_is_profile(one) for one in (device, server, edge) if one is not None):
        return None
    texts = (device, edge or server, server)
    machines = [
        Machine.parse(text).at_speed_of(profile) for text, profile in zip(texts, profiles, strict=True)
    ]
    first = MeasuredCuts(
        graph.content,
        feeds,
        machines[0],
        machines[1],
        options["seconds"],
        graph.options,
        classes,
    )
    return first if edge_link is None else TieredCuts(first, machines[2], edge_link)


def _check_machine(text: str | None, option: str) -> None:
    """Check that a text names a profile, a machine or a URL.

    Raises:
        CutError: it is none of these.
    """
    if text is None or _is_profile(text) or (option == "--server" and is_url(text)):
        return
    try:
        Machine.parse(text)
    except CutError as cause:
        also = "the file of a profile" + (" and http(s)://HOST:PORT" if option == "--server" else "")
        raise CutError(f"{option}: {cause}; {also} would do too") from cause


def _is_profile(text: str) -> bool:
    return text.endswith(".json") or Path(text).is_file()


def parse_percent(text: str, option: str) -> float:
    """Return a percentage as a share.

    Raises:
        click.BadParameter: it is no percentage, or not between 0 and 100.
    """
    number = text.strip().removesuffix("%")
    if number == text.strip() or _number(number, option) > 100:
        raise click.BadParameter(f"{text!r}: expected a percentage such as 0.1%", param_hint=option)
    return _number(number, option) / 100


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


def parse_bytes(text: str, option: str) -> float:
    """Return the number of bytes that an option names.

    Raises:
        click.BadParameter: something else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a size such as 64MB", param_hint=option)
    return _number(match[1], option) * _BYTES[match[2]]


def _profile(
    text: str, name: str, graph: RunnableGraph, seconds: float, progress: ProgressBar
) -> ModelProfile:
    """Return the profile in a file, or measure one on a machine."""
    if _is_profile(text):
        return read_profile(Path(text))
    machine = Machine.parse(text)
    progress.show(f"profiling on {text}")
    return profile_kernels(machine, graph, name=name, seconds=seconds)
