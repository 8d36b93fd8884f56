"""The record of how packages are made for an engine, and the registry of these records.

This is the host's counterpart of `edgekit_runtime.system.engines.Engine`, which describes how a device runs
an engine. To add an engine, add a module to `edgekit_runtime.engines` and one here. No other code compares
the name of an engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import onnx

from edgekit_runtime.errors import TargetError
from edgekit_runtime.system.engines import find_engine
from edgekit_toolkit.engines.tensorrt_check import TensorRtCheck
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import Target


class OpenQuantizer(Protocol):
    """Returns the quantizer of a float model for an engine."""

    def __call__(
        self, model: Model, target: Target, *, threads: int, dims: Mapping[str, int], feeds: Sequence[Feeds]
    ) -> Quantizer:
        """Return the quantizer.

        Args:
            model: optimised float model.
            target: target of the package.
            threads: threads of one inference while candidates are judged.
            dims: sizes that a conversion fixes.
            feeds: inputs on which a conversion is checked.

        Raises:
            ModelError: the model cannot be converted to the engine's format.
            EngineMissingError: the engine or its quantizer is not installed here.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMaker:
    """Makes models in the format of an engine.

    Attributes:
        open_quantizer: Returns the quantizer of a float model.
        build: Takes a float model, a form and the sizes of free dimensions. Returns the model in that form,
            or None if the form does not suit the model. The outputs of the result are not checked.
        convert: Converts a float model to the format of the engine. The outputs of the result are not
            checked.
        convert_codes: Takes an ONNX network with 8-bit codes and the same network in float. Returns the model
            for the engine.
        codes_tool: The distribution that `convert_codes` uses, or empty.
        fixes_sizes: Whether the models have no free dimensions.
    """

    open_quantizer: OpenQuantizer
    build: Callable[[Model, Form, Mapping[str, int]], Model | None]
    convert: Callable[[onnx.ModelProto], Model]
    convert_codes: Callable[[onnx.ModelProto, onnx.ModelProto], Model]
    codes_tool: str = ""
    fixes_sizes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UntimedForm:
    """A form of a model that only some devices can compute. Its latency cannot be measured on a host.

    Attributes:
        label: The name in reports.
        isa: The instruction set extension, as in `cpu.isa` of targets.
        check: Raises EngineMissingError if this host cannot compute the form.
    """

    label: str
    isa: str
    check: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """How packages are made for an engine.

    Attributes:
        kinds: The kinds of forms that the engine runs, from `quantize.forms.KINDS`.
        judged_on: The engine that runs candidates on this host, which is this engine or a substitute.
        tools: The distributions that affect the bytes of a package, in addition to those for all engines.
        fallback: The engine that a device uses if it cannot use this engine, or empty.
        competes: Whether other engines are measured too if this is the preferred engine of the target.
        shares_cores: Whether the engine uses several threads by default.
        slows_exact_products: Whether exact 8-bit products are slow on x86 processors without VNNI.
        cheap_row_macs: The maximum multiply-adds of a model that gets the maximum number of golden rows.
            Larger models get fewer rows. None if all models get one row.
        check: Takes a model, and inputs that set the free dimensions other than the batch. Returns the
            verdict of the engine's own parser. None if there is no such check.
        notes: The warnings about the figures of all packages for this engine.
        untimed: A dict from kind to the form of this kind, for kinds in `quantize.forms.UNTIMED_KINDS`.
    """

    name: str
    maker: ModelMaker
    kinds: frozenset[str]
    judged_on: str
    tools: tuple[str, ...] = ()
    fallback: str = ""
    competes: bool = False
    shares_cores: bool = True
    slows_exact_products: bool = True
    cheap_row_macs: float | None = 8e6
    check: Callable[[Model, Feeds], TensorRtCheck] | None = None
    notes: tuple[str, ...] = ()
    untimed: Mapping[str, UntimedForm] = field(default_factory=dict)

    @property
    def on_gpu(self) -> bool:
        return find_engine(self.name).on_gpu

    @property
    def runs_here(self) -> bool:
        return self.judged_on == self.name


SUPPORTS: Final[dict[str, EngineSupport]] = {}
"""A dict from engine names to records that say how packages are made for the engine."""


def register_support(support: EngineSupport) -> EngineSupport:
    """Add a record to `SUPPORTS` or replace the record of the same engine, and return it."""
    SUPPORTS[support.name] = support
    return support


def find_support(engine: str) -> EngineSupport:
    """Return how packages are made for an engine.

    Raises:
        TargetError: There is no such engine, or no packages are made for it.
    """
    if engine not in SUPPORTS:
        raise TargetError(f"engine: expected one of {', '.join(SUPPORTS)}, got {engine!r}")
    return SUPPORTS[engine]


def list_supported() -> tuple[str, ...]:
    """Return the names of the engines for which packages can be made."""
    return tuple(sorted(SUPPORTS))
