"""The records of a target file. They are immutable, and are validated on creation.

Every number is a `Figure` with a unit, a status and the key of its source.
"""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from edgekit_runtime.errors import TargetError
from edgekit_runtime.system.engines import find_engine, list_registered
from edgekit_toolkit.targets.figures import Figure, Source, check_figures

Precision = Literal["fp32", "fp16", "int8"]
Form = Literal["symmetric", "asymmetric"]
Architecture = Literal["aarch64", "x86_64"]
CodeType = Literal["int8", "uint8"]

_LEAST_S, _MOST_S = 1e-7, 1e4  # of a calibration network on any device
NAME_PATTERN = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


@dataclass(frozen=True, slots=True)
class Memory:
    """The RAM in bytes. `free` is the part that the system and the application leave free for a model."""

    total: Figure
    free: Figure

    def __post_init__(self) -> None:
        check_figures(self, "B", "total", "free")
        if self.free.value > self.total.value:
            raise TargetError(f"free: expected at most total ({self.total.value}), got {self.free.value}")


@dataclass(frozen=True, slots=True)
class Storage:
    """The storage for packages: its kind, such as `microSD or NVMe`, and the free bytes."""

    kind: str
    free: Figure

    def __post_init__(self) -> None:
        check_figures(self, "B", "free")


@dataclass(frozen=True, slots=True)
class Cpu:
    """The processor: its cores for inference, their maximum clock in Hz, and int8 and fp16 instructions."""

    model: str
    cores: Figure
    clock: Figure
    isa: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_figures(self, "1", "cores")
        check_figures(self, "Hz", "clock")


@dataclass(frozen=True, slots=True)
class PowerMode:
    """A power mode of the device.

    Attributes:
        active: The power of the whole board during inference in watts.
        compute_scale: The speed of arithmetic relative to the figures in `Costs`.
        bandwidth_scale: The memory bandwidth relative to the figure in `Costs`.
        limit: The power limit that the vendor states in watts, or None.
    """

    name: str
    active: Figure
    compute_scale: Figure
    bandwidth_scale: Figure
    limit: Figure | None = None

    def __post_init__(self) -> None:
        check_figures(self, "W", "active")
        check_figures(self, "1", "compute_scale", "bandwidth_scale")
        if self.limit is not None:
            check_figures(self, "W", "limit")


@dataclass(frozen=True, slots=True)
class Power:
    """The power of the idle board in watts, the power modes, and the name of the default mode."""

    idle: Figure
    default_mode: str
    modes: tuple[PowerMode, ...]

    def __post_init__(self) -> None:
        check_figures(self, "W", "idle")
        names = [mode.name for mode in self.modes]
        if len(set(names)) != len(names):
            raise TargetError(f"modes: expected distinct names, got {', '.join(names)}")
        if self.default_mode not in names:
            raise TargetError(f"default_mode: expected one of {', '.join(names)}, got {self.default_mode!r}")
        for mode in self.modes:
            if mode.active.value < self.idle.value:
                raise TargetError(
                    f"modes.{mode.name}.active: expected at least idle ({self.idle.value} W), "
                    f"got {mode.active.value}"
                )

    def mode(self, name: str) -> PowerMode:
        """Return the power mode called `name`.

        Raises:
            TargetError: There is no such mode.
        """
        for mode in self.modes:
            if mode.name == name:
                return mode
        raise TargetError(
            f"power mode: expected one of {', '.join([mode.name for mode in self.modes])}, got {name!r}"
        )


@dataclass(frozen=True, slots=True)
class Release:
    """A release of the device's operating system.

    Attributes:
        python: The version of the included Python as major.minor, or `none`.
        engines: A dict from the name of an engine to its newest version that is known to install.
        source: The key of a `Source`.
    """

    name: str
    python: str
    engines: Mapping[str, str]
    source: str

    def __post_init__(self) -> None:
        if not re.fullmatch(r"3\.\d+|none", self.python):
            raise TargetError(f"python: expected 3.N or none, got {self.python!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The kind of int8 quantization that the target's default backend runs fast.

    Attributes:
        form: The quantization of activations. With `symmetric`, all zero points are 0.
        activations: The dtype of activations, int8 or uint8.
        weights: The dtype of weights, int8 or uint8. They are always symmetric.
        per_channel: Whether each output channel may have its own weight scale.
        quantized_bias: Whether biases become int32. TensorRT requires float biases.
        dedicated_qdq: Whether each quantized input needs its own QuantizeLinear/DequantizeLinear pair.
        reduce_range: Whether weights use only 7 bits. Products of 8-bit weights can saturate 16-bit sums.
        source: The key of a `Source`.
    """

    form: Form
    activations: CodeType
    weights: CodeType
    per_channel: bool
    quantized_bias: bool
    dedicated_qdq: bool
    reduce_range: bool
    source: str

    def __post_init__(self) -> None:
        if self.form == "symmetric" and self.activations != "int8":
            raise TargetError(f"activations: expected int8 in the symmetric form, got {self.activations!r}")


@dataclass(frozen=True, slots=True)
class Backend:
    """The names of the backends of a target.

    Attributes:
        default: The backend for which models are packaged.
        fallback: The backend that the device falls back to, or None.
        optional: Further backends, which are used where they are installed.
    """

    default: str
    fallback: str | None = None
    optional: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        engines = [engine.name for engine in list_registered() if engine.file_format]
        optional = (("optional", name) for name in self.optional)
        for field, name in (("default", self.default), ("fallback", self.fallback), *optional):
            if name is not None and name not in engines:
                raise TargetError(f"{field} is {name!r}, expected one of {', '.join(engines)}")
        if self.fallback == self.default:
            raise TargetError(f"fallback: expected another backend than {self.default!r}")
        if len(set(self.names)) != len(self.names):
            raise TargetError(f"optional: expected other backends than {', '.join(self.names[:2])}")

    @property
    def names(self) -> list[str]:
        """The names of all backends: `default`, `fallback` and `optional`."""
        return [name for name in (self.default, self.fallback, *self.optional) if name is not None]

    @property
    def on_gpu(self) -> bool:
        """Whether the default backend computes on a GPU."""
        return find_engine(self.default).on_gpu


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The coefficients of the latency model for the default backend.

    They apply to the power mode whose `compute_scale` and `bandwidth_scale` are 1.

    Attributes:
        fp32, int8: The effective multiply-accumulates per second of large kernels.
        fp16: The same for half precision, or None if the backend lacks fp16 kernels and casts to fp32.
        memory: The effective memory bandwidth for activations and weights in bytes per second.
        kernel_overhead: The seconds to start a kernel.
        uncertainty: The factor by which a modelled latency may be too high or too low, at least 1.
    """

    fp32: Figure
    int8: Figure
    memory: Figure
    kernel_overhead: Figure
    uncertainty: Figure
    fp16: Figure | None = None

    def __post_init__(self) -> None:
        check_figures(self, "MAC/s", "fp32", "int8", *(["fp16"] if self.fp16 is not None else []))
        check_figures(self, "B/s", "memory")
        check_figures(self, "s", "kernel_overhead", zero=True)
        check_figures(self, "1", "uncertainty")
        if self.uncertainty.value < 1:
            raise TargetError(f"uncertainty: expected a factor of at least 1, got {self.uncertainty.value}")

    @property
    def form_uncertainty(self) -> float:
        """Return the factor by which the ratio of the modelled latencies of two candidates may be wrong.

        It is the square root of `uncertainty`, because errors in the clock, the memory bandwidth or the
        kernel overhead affect all candidates of a model alike. docs/reference/targets.md compares it with
        measurements.
        """
        return math.sqrt(self.uncertainty.value)

    def macs_per_s(self, precision: Precision) -> float:
        """Return the multiply-accumulates per second. Without fp16 kernels, fp16 has the value of fp32."""
        figure = {"fp32": self.fp32, "fp16": self.fp16 or self.fp32, "int8": self.int8}[precision]
        return figure.value


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """The times of the calibration networks on a device, as measured by `edgekit profile`.

    Attributes:
        device: The model of the board, or of its processor if the board is unknown.
        engine: The name and release of the engine on the device.
        networks: The digest of the networks.
        seconds: The time of one inference for each network, by name.
        uncertainty: The largest factor between the measured time of a network and the time that is predicted
            from the other networks, or None if it was not determined.
    """

    device: str
    engine: str
    networks: str
    seconds: Mapping[str, Figure]
    uncertainty: Figure | None = None

    def __post_init__(self) -> None:
        if self.uncertainty is not None and (self.uncertainty.unit != "1" or self.uncertainty.value < 1):
            raise TargetError(f"uncertainty: expected a factor of at least 1, got {self.uncertainty.value:g}")
        if not self.seconds:
            raise TargetError("seconds: expected the time of one network at least, got none")
        for name, figure in self.seconds.items():
            if figure.unit != "s" or not _LEAST_S <= figure.value <= _MOST_S:
                raise TargetError(
                    f"seconds.{name}: expected {_LEAST_S:g} to {_MOST_S:g} of unit 's', got {figure.value:g}"
                    f" of {figure.unit!r}"
                )

    @property
    def is_real(self) -> bool:
        """Whether the times were measured on a real device instead of an emulated one."""
        return all(figure.status == "measured" for figure in self.seconds.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The architecture, backend and device class for which a model is compiled, with their figures.

    Attributes:
        name: The name, lower-case words joined by hyphens.
        title: The name for display.
        releases: The releases of the operating system, at least one.
        sources: The sources of the figures, see `Figure.source`.
        device_times: The times of the calibration networks on such a device, or None if none was profiled.
        accelerator: A description of the GPU or other accelerator, empty if there is none.
    """

    name: str
    title: str
    arch: Architecture
    memory: Memory
    storage: Storage
    cpu: Cpu
    power: Power
    releases: tuple[Release, ...]
    quantization: Quantization
    backend: Backend
    costs: Costs
    sources: tuple[Source, ...]
    device_times: DeviceTimes | None = None
    aliases: tuple[str, ...] = ()
    accelerator: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        for name in (self.name, *self.aliases):
            if not NAME_PATTERN.fullmatch(name):
                raise TargetError(f"name: expected lower-case words joined by hyphens, got {name!r}")
        if not self.releases:
            raise TargetError("releases: expected at least one, got none")
        keys = [source.key for source in self.sources]
        if len(set(keys)) != len(keys):
            raise TargetError(f"sources: expected distinct keys, got {', '.join(keys)}")
        self._check_sources()

    def source(self, key: str) -> Source:
        """Return the source whose key is `key`.

        Raises:
            TargetError: There is no such source.
        """
        for source in self.sources:
            if source.key == key:
                return source
        raise TargetError(f"source: expected the key of one of [[sources]], got {key!r}")

    def in_mode(self, power_mode: str) -> "Target":
        """Return the target with another default power mode. `device_times` are removed if the mode changes.

        Raises:
            TargetError: There is no such mode.
        """
        try:
            self.power.mode(power_mode)
        except TargetError as error:
            raise TargetError(f"{self.name}: {error}") from error
        power = dataclasses.replace(self.power, default_mode=power_mode)
        # Times were measured in one mode.
        times = self.device_times if power_mode == self.power.default_mode else None
        return dataclasses.replace(self, power=power, device_times=times)

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield each figure with its path, such as `power.modes.25W.active`."""
        for part in ("memory", "storage", "cpu", "power", "costs", "device_times"):
            yield from _figures(part, getattr(self, part))

    def _check_sources(self) -> None:
        for path, figure in self.figures():
            try:
                source = self.source(figure.source)
            except TargetError as error:
                raise TargetError(f"{path}.{error}") from error
            # A figure of our own needs a derivation; a foreign figure needs its place.
            required = "derivation" if figure.status in {"measured", "estimated"} else "where"
            if not getattr(source, required).strip():
                raise TargetError(
                    f"{path}.source: expected a source with `{required}` for a figure with status "
                    f"{figure.status!r}, got {source.key!r} without"
                )
        for key in (self.quantization.source, *(release.source for release in self.releases)):
            self.source(key)


def _figures(path: str, record: object) -> Iterator[tuple[str, Figure]]:
    if isinstance(record, Figure):
        yield path, record
    elif isinstance(record, tuple):
        for mode in record:
            if isinstance(mode, PowerMode):
                yield from _figures(f"{path}.{mode.name}", mode)
    elif isinstance(record, Mapping):
        for key, value in record.items():
            yield from _figures(f"{path}.{key}", value)
    elif dataclasses.is_dataclass(record):
        for item in dataclasses.fields(record):
            yield from _figures(f"{path}.{item.name}", getattr(record, item.name))
