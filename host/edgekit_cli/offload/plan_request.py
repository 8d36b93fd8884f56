"""Parses the options of `edgekit offload plan`, reads the samples, and reads or measures the profiles."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from edgekit_cli.offload.source import MAX_SAMPLES, read_samples, read_whole_model
from edgekit_cli.progress import ProgressBar
from edgekit_offload.packaging.plan_package import TieredMeasurement
from edgekit_offload.partition.coding import LOSSY_SAMPLES
from edgekit_offload.partition.opened_model import Feeds, OpenedModel
from edgekit_offload.planning.cascade import CascadeInputs
from edgekit_offload.planning.costs import DeviceLimits, PowerModel
from edgekit_offload.planning.envelope import Grid
from edgekit_offload.planning.leakage import LEAST_FOR_LIMIT, Leakage
from edgekit_offload.planning.leakage import MAX_SAMPLES as MAX_ATTACKED
from edgekit_offload.planning.measurement import CutMeasurement, leakage_of
from edgekit_offload.planning.plan_inputs import PlanInputs
from edgekit_offload.planning.probed_server import ServerAccess, check_server, is_url, probe_server
from edgekit_offload.planning.result import SentTensor
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.model_profile import ModelProfile, read_profile
from edgekit_runtime.canonical_json import JsonValue
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.latency_model import LinkState
from edgekit_runtime.offload.objectives import OBJECTIVES
from edgekit_toolkit.openings.model_opening import check_opening

_LEAKAGE_LIMIT_S: Final = 8.0  # time of all attacks, unless a limit on leakage is given
_LEAST_ATTACKED: Final = 40  # with fewer samples, leakage is measured on request only
_ANSWERS_S: Final = 1.0  # time of whole-model runs in which each candidate answers samples
_POINTS: Final = 9  # points of a range of bandwidths
_MAX_POINTS: Final = 64
_RANGE = re.compile(r"([0-9.]+)\.\.([0-9.]+)")
_EDGE_LINK = re.compile(r"([0-9.]+)@([0-9.]+)")
_BYTES: Final = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_SIZE = re.compile(rf"([0-9.]+)\s*({'|'.join(_BYTES)})")


def parse_bandwidths(text: str) -> tuple[float, ...]:
    """Parse bandwidths in Mbit/s, either as comma-separated numbers or as a range `A..B`.

    A range gives 9 values with a constant ratio between neighbours.

    Raises:
        click.BadParameter: The text is neither a range nor numbers above 0.
    """
    if match := _RANGE.fullmatch(text.strip()):
        low, high = _number(match[1], "--bandwidth"), _number(match[2], "--bandwidth")
        if 0 < low <= high:
            return tuple(sorted({float(f"{mbit_s:.3g}") for mbit_s in np.geomspace(low, high, _POINTS)}))
        raise click.BadParameter(
            f"{text!r}: expected A..B with 0 < A <= B; over a link of 0 nothing can be sent",
            param_hint="--bandwidth",
        )
    return parse_numbers(text, "--bandwidth")


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Parse comma-separated numbers above 0, and return them in ascending order without duplicates.

    Raises:
        click.BadParameter: The text is malformed, or has too many numbers.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """The parsed options of `edgekit offload plan`.

    Attributes:
        device, server, edge: The path of a profile, or a machine such as `ssh:HOST`. `server` may also be a
            URL. `edge` and `edge_link` are None if there is no machine between device and server.
        access: The access to the server if `server` is a URL, or None.
        most_leakage_db: The maximum leakage (PSNR) of a candidate, or None for no limit.
        max_loss: The maximum share of answers that become wrong if the sent tensors are compressed, 0 to 1.
        classes: The names of outputs with class scores.
        sample_rate_hz: The sample rate of audio. None means the rate in the package, or 16000 if the package
            has no rate.
        cascade: The small model that the device runs first, or None.
        agreement: The minimum share of answers in which a cascade agrees with the model, 0 to 1.
        seconds: How long to measure on each machine.
    """

    model: Path
    device: str
    server: str
    access: ServerAccess | None
    edge: str | None
    edge_link: LinkState | None
    grid: Grid
    samples: Path | None
    objective: str
    latency_limit_s: float | None
    requests_per_s: float
    power: PowerModel | None
    limits: DeviceLimits
    keep_on_device: tuple[str, ...]
    most_leakage_db: float | None
    max_loss: float
    classes: tuple[str, ...]
    sample_rate_hz: float | None
    cascade: Path | None
    agreement: float
    seconds: float

    @classmethod
    def parse(cls, model: Path, options: Mapping[str, Any]) -> "PlanRequest":
        """Parse the options, which have names such as `max_loss` for `--max-loss`.

        Raises:
            click.UsageError: An option is malformed, or two options exclude each other.
            CutError: A text names neither a machine nor a profile.
        """
        server, is_tiered, limit_ms = options["server"], options["tiers"] > 2, options["latency_limit"]
        for option in ("--device", "--server", "--edge"):
            _check_machine(options[option[2:]], option)
        access = None
        if is_url(server):
            access = ServerAccess(
                url=server,
                token_file=options["token_file"],
                ca_file=options["ca_file"],
                insecure=options["insecure"],
            )
        _check_tiers(options, is_tiered=is_tiered, by_url=access is not None)
        memory, weights = (
            None if options[limit] is None else parse_bytes(options[limit], f"--{limit}")
            for limit in ("memory", "weights")
        )
        return cls(
            model=model,
            device=options["device"],
            server=server,
            access=access,
            edge=options["edge"],
            edge_link=_parse_link(options["edge_link"]) if is_tiered else None,
            grid=Grid(parse_bandwidths(options["bandwidth"]), parse_numbers(options["rtt"], "--rtt")),
            samples=options["samples"],
            objective=options["objective"],
            latency_limit_s=None if limit_ms is None else limit_ms / 1e3,
            requests_per_s=options["requests_per_s"],
            power=None if options["power"] is None else PowerModel(*parse_watts(options["power"])),
            limits=DeviceLimits(weights, memory),
            keep_on_device=tuple(options["keep_on_device"]),
            most_leakage_db=options["max_leak"],
            max_loss=parse_percent(options["max_loss"], "--max-loss"),
            classes=tuple(options["classes"]),
            sample_rate_hz=options["sample_rate"],
            cascade=options["cascade"],
            agreement=options["agreement"],
            seconds=options["seconds"],
        )


def _check_tiers(options: Mapping[str, Any], *, is_tiered: bool, by_url: bool) -> None:
    """Check the options for three tiers.

    Raises:
        click.UsageError: The options exclude each other, or one is missing.
    """
    if not is_tiered:
        if options["edge"] is not None:
            raise click.UsageError("--edge needs --tiers 3")
        return
    if by_url:
        raise click.UsageError("--tiers 3 needs a profile or a machine as --server, not a URL")
    if not OBJECTIVES[options["objective"]].spans_tiers:
        raise click.UsageError("--tiers 3 places kernels for the least latency: leave --objective out")
    if options["edge"] is None:
        raise click.UsageError("--tiers 3 needs the machine between device and server: --edge")


def _parse_link(text: str) -> LinkState:
    match = _EDGE_LINK.fullmatch(text)
    if match is None:
        raise click.BadParameter("expected MBIT/S@MS, such as 100@10", param_hint="--edge-link")
    bits_per_s, rtt_s = _number(match[1], "--edge-link") * 1e6, _number(match[2], "--edge-link") / 1e3
    return LinkState(bits_per_s, bits_per_s, rtt_s)


def read_inputs(request: PlanRequest, progress: ProgressBar) -> PlanInputs:
    """Read or measure the inputs of a plan: the model, the samples and the profiles of the machines.

    A machine without a profile is measured for about `request.seconds`.

    Raises:
        EdgekitError: The model, the samples or a profile cannot be used, or a machine cannot be measured.
    """
    name, graph, stated, stated_hz = read_whole_model(request.model)
    model = OpenedModel(graph.content)
    classes = stated | _check_classes(model, request.classes)
    if request.access is not None:
        check_server(request.access, name)
    at_most, least = (
        (MAX_SAMPLES,) * 2 if request.most_leakage_db is None else (MAX_ATTACKED, LEAST_FOR_LIMIT)
    )
    samples, notes = read_samples(request.model, model.content, request.samples, at_most, least)
    check_opening("ort", model.content, graph.options, samples[:1])
    leakage = _make_attack(request, model, samples)
    answers = max(LOSSY_SAMPLES, int(_ANSWERS_S / max(model.run_seconds(samples[0]), 1e-6)))
    feeds = samples[: min(answers, MAX_SAMPLES)]
    peer = "local" if request.access is not None else request.server
    profiles = {  # a machine that is both ends is measured once
        text: _profile(text, name, graph, request.seconds, progress)
        for text in dict.fromkeys((request.device, peer, request.edge))
        if text is not None
    }
    device, server = profiles[request.device], profiles[peer]
    edge = None if request.edge is None else profiles[request.edge]
    grid = request.grid
    measure = _measurement(request, model, feeds, graph.options, classes, profiles=profiles)
    if request.access is not None:
        progress.show(f"measuring {request.server}")
        probed = probe_server(request.access, server, feeds[0], request.seconds)
        server, notes, grid = probed.profile, (*notes, probed.note), _add_link(grid, probed.link.state)
    cascade = None
    if request.cascade is not None:
        small = OpenedModel(read_whole_model(request.cascade).graph.content)
        cascade = CascadeInputs(small=small, agreement=request.agreement, feeds=samples, classes=classes)
    return PlanInputs(
        name=name,
        model=model,
        device=device,
        server=server,
        grid=grid,
        feeds=feeds,
        objective=request.objective,
        power=request.power,
        latency_limit_s=request.latency_limit_s,
        requests_per_s=request.requests_per_s,
        limits=request.limits,
        keep_on_device=request.keep_on_device,
        edge=edge,
        edge_link=request.edge_link,
        measure=measure,
        leakage=leakage,
        most_leakage_db=request.most_leakage_db,
        notes=notes,
        is_server_modelled=request.access is not None,
        cascade=cascade,
        max_loss=request.max_loss,
        has_samples=request.samples is not None,
        sample_rate_hz=request.sample_rate_hz or stated_hz,
    )


def _make_attack(
    request: PlanRequest, model: OpenedModel, samples: Sequence[Feeds]
) -> Callable[[Sequence[SentTensor]], Leakage | None] | None:
    """Return the attack that measures leakage, or None if there is no limit and too few samples.

    Raises:
        CutError: There are too few samples for a limit.
    """
    if request.most_leakage_db is None:
        is_possible = len(samples) >= _LEAST_ATTACKED
        return leakage_of(model, samples, limit_s=_LEAKAGE_LIMIT_S) if is_possible else None
    if len(samples) < LEAST_FOR_LIMIT:
        count = f"there are {len(samples)}" if request.samples is not None else "there are none"
        raise CutError(
            f"--max-leak needs at least {LEAST_FOR_LIMIT:,} distinct samples, {count}: with fewer, the"
            " attacker learns too little, and a leak looks harmless; give more by --samples"
        )
    return leakage_of(model, samples)


def _check_classes(model: OpenedModel, named: Sequence[str]) -> frozenset[str]:
    """Return the outputs in `--classes`.

    Raises:
        click.BadParameter: The model has no such output.
    """
    output_names = [output.name for output in model.proto.graph.output]
    if unknown := set(named) - set(output_names):
        raise click.BadParameter(
            f"{min(unknown)!r}: the model has the outputs {', '.join(output_names)}", param_hint="--classes"
        )
    return frozenset(named)


def _add_link(grid: Grid, link: LinkState) -> Grid:
    """Return a grid that also includes the current setting of a link."""
    bandwidths = {*grid.bandwidths_mbit_s, float(f"{link.up_bits_per_s / 1e6:.3g}")}
    return Grid(tuple(sorted(bandwidths)), tuple(sorted({*grid.rtts_ms, float(f"{link.rtt_s * 1e3:.3g}")})))


def _measurement(
    request: PlanRequest,
    model: OpenedModel,
    feeds: Sequence[Feeds],
    options: Mapping[str, JsonValue],
    classes: frozenset[str],
    *,
    profiles: Mapping[str, ModelProfile],
) -> CutMeasurement | TieredMeasurement | None:
    """Return the measurement of real cuts, or None if only the profile of a machine is available."""
    texts = (request.device, request.edge or request.server, request.server)
    if request.access is not None or any(map(_is_profile, texts)):
        return None
    device, peer, server = (Machine.parse(text).at_speed_of(profiles[text]) for text in texts)
    measured = CutMeasurement(
        model=model,
        feeds=feeds,
        device=device,
        server=peer,
        seconds=request.seconds,
        options=options,
        classes=classes,
    )
    link = request.edge_link
    return measured if link is None else TieredMeasurement(measured, server, link)


def _check_machine(text: str | None, option: str) -> None:
    """Check that a text is a profile, a machine or a URL.

    Raises:
        CutError: The text is none of these.
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
    """Parse a percentage and return it as a share, such as 0.001 for `0.1%`.

    Raises:
        click.BadParameter: The text is not a percentage from 0 to 100.
    """
    number = text.strip().removesuffix("%")
    if number == text.strip() or _number(number, option) > 100:
        raise click.BadParameter(f"{text!r}: expected a percentage such as 0.1%", param_hint=option)
    return _number(number, option) / 100


def parse_watts(text: str) -> tuple[float, float]:
    """Parse `COMPUTE,RADIO` of the option `--power`, and return both powers in watts.

    Raises:
        click.BadParameter: The text is not two powers.
    """
    parts = [_number(part, "--power") for part in text.split(",")]
    if len(parts) != 2:
        raise click.BadParameter(
            f"{text!r}: expected COMPUTE,RADIO in watts, such as 4,1", param_hint="--power"
        )
    return parts[0], parts[1]


def parse_bytes(text: str, option: str) -> float:
    """Parse a size such as `64MB` or `8 KiB`, and return it in bytes.

    Raises:
        click.BadParameter: The text is not a size. The message names `option`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise click.BadParameter(f"{text!r}: expected a size such as 64MB", param_hint=option)
    return _number(match[1], option) * _BYTES[match[2]]


def _profile(
    text: str, name: str, graph: RunnableGraph, seconds: float, progress: ProgressBar
) -> ModelProfile:
    """Read a profile from a file, or measure one on a machine."""
    if _is_profile(text):
        return read_profile(Path(text))
    machine = Machine.parse(text)
    progress.show(f"profiling on {text}")
    return profile_kernels(machine, graph, name=name, seconds=seconds)
