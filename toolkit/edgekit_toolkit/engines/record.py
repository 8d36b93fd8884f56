"""The record of how packages are made for an engine, and the table of the engines that have one.

It is the host's side of `edgekit_runtime.system.engines.Engine`, which says how a device runs the engine.
A new engine is a module in `edgekit_runtime.engines` and one here. The search, the judge, the packager and
the commands ask these two records; none compares the name of an engine.
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
        open_quantizer: returns the quantizer of a float model.
        build: (float model, form of a recipe, sizes of free dimensions) -> model of that form, or None if the
            form does not suit the model. Conversions are not checked again.
        convert: makes a float model in the engine's format, without a check.
        convert_codes: (ONNX network with 8-bit codes, the same network in float) -> the engine's model of it.
        codes_tool: distribution whose release changes what `convert_codes` makes; empty for none.
        fixes_sizes: whether the models have no free dimensions.
    """

    open_quantizer: OpenQuantizer
    build: Callable[[Model, Form, Mapping[str, int]], Model | None]
    convert: Callable[[onnx.ModelProto], Model]
    convert_codes: Callable[[onnx.ModelProto, onnx.ModelProto], Model]
    codes_tool: str = ""
    fixes_sizes: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UntimedForm:
    """A form that only processors of some devices compute, so that no host can time it.

    Attributes:
        label: name in reports.
        isa: the arithmetic, as targets name it in `cpu.isa`.
        check: raises EngineMissingError where the form cannot be computed on this host.
    """

    label: str
    isa: str
    check: Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSupport:
    """How packages are made for an engine.

    Attributes:
        kinds: kinds of forms that it runs, of `quantize.forms.KINDS`.
        judged_on: the engine that runs the candidates on this host: this engine, or a stand-in.
        tools: distributions that decide the bytes of a package, beside those for every engine.
        fallback: the engine of the package's fallback on the device; empty for none.
        competes: whether other engines are timed against it even where it is the target's preferred engine.
        shares_cores: whether it takes several threads unless a package says otherwise.
        slows_exact_products: whether its exact 8-bit products are slow on x86 processors without VNNI.
        cheap_row_macs: a model of at most so many multiply-adds an inference gets all golden rows, because
            they run in half the time that opening the model takes. None: all models get the first row only.
        check: (model, inputs that set the sizes of free dimensions other than the batch) -> verdict of the
            engine's own parser; None if the parser is not asked.
        notes: warnings about the figures of every package for it.
        untimed: kind of `quantize.forms.UNTIMED_KINDS` -> the form, where the engine has it.
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
"""Name of an engine -> how packages are made for it."""


def register_support(support: EngineSupport) -> EngineSupport:
    """Enter a record in `SUPPORTS`, where it replaces an earlier record of its engine; return the record."""
    SUPPORTS[support.name] = support
    return support


def find_support(engine: str) -> EngineSupport:
    """Return how packages are made for an engine.

    Raises:
        TargetError: there is no such engine, or no packages are made for it.
    """
    if engine not in SUPPORTS:
        raise TargetError(f"engine: expected one of {', '.join(SUPPORTS)}, got {engine!r}")
    return SUPPORTS[engine]


def list_supported() -> tuple[str, ...]:
    """Return the names of the engines that packages are made for here."""
    return tuple(sorted(SUPPORTS))
