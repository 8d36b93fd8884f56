"""Chooses the quantizer of each backend, and the forms that its engine runs."""

from collections.abc import Mapping, Sequence
from typing import Final

from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import LITERT, LITERT_AVX512, SCHEMES, Scheme
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import Target

# TensorRT takes none of the other forms (docs/reference/tensorrt.md).
KINDS: Final = {
    "ort": frozenset(forms.KINDS),
    "litert": frozenset(forms.KINDS),
    "tensorrt": frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.STATIC_INT8}),
}


def open_quantizer(
    model: Model,
    backend: str,
    target: Target,
    *,
    threads: int,
    dims: Mapping[str, int],
    feeds: Sequence[Feeds],
) -> Quantizer:
    """Return the quantizer of a float model for the engine that the package is for.

    Args:
        model: optimised float model.
        backend: the engine, a key of `KINDS`.
        target: target of the package.
        threads: threads of one inference while candidates are judged.
        dims: sizes that a conversion fixes.
        feeds: inputs on which a conversion is checked.

    Raises:
        ModelError: the model cannot be converted to the engine's format.
        EngineMissingError: this needs LiteRT, which is not installed here.
    """
    proto = model.proto if isinstance(model, OnnxModel) else None
    if proto is not None and backend != "litert":
        return OnnxQuantizer(proto, _scheme(backend, target), threads=threads)
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.tflite.check import convert_checked

    content = model.content if proto is None else convert_checked(proto, dims, feeds)
    scheme = LITERT_AVX512 if "avx512" in target.cpu.isa else LITERT
    return LiteRtQuantizer(content, threads=threads, scheme=scheme)


def _scheme(backend: str, target: Target) -> Scheme:
    """The quantized form that the engine runs: TensorRT's own, or that of onnxruntime on this processor."""
    if backend == "tensorrt":
        return SCHEMES[target.quantization.form]
    return SCHEMES["asymmetric-7bit" if target.quantization.reduce_range else "asymmetric"]
