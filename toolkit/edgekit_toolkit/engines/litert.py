"""Packages for LiteRT, converted by our own writer and quantized with algorithms of ai-edge-quantizer.

LiteRT is imported only where it is used, because not every host has it.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import onnx

from edgekit_runtime.engines.litert import LITERT
from edgekit_toolkit.engines.record import EngineSupport, ModelMaker, UntimedForm, register_support
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.openings.emulated_processor import find_emulated_python
from edgekit_toolkit.quantize import forms, scheme
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.plan import Plan
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import Scheme
from edgekit_toolkit.samples.generated import Feeds, generate_feeds
from edgekit_toolkit.targets.spec import Target

_CODES_RANGE: Final = (-8.0, 8.0)  # of all 8-bit codes. The values do not matter


def _open_quantizer(
    model: Model, target: Target, *, threads: int, dims: Mapping[str, int], feeds: Sequence[Feeds]
) -> Quantizer:
    from edgekit_toolkit.tflite.check import convert_checked

    content = convert_checked(model.proto, dims, feeds) if isinstance(model, OnnxModel) else model.content
    codes = scheme.LITERT_AVX512 if "avx512" in target.cpu.isa else scheme.LITERT
    return _quantizer(model, content, dims, threads=threads, codes=codes)


def _build(model: Model, form: Form, dims: Mapping[str, int]) -> Model | None:
    from edgekit_toolkit.tflite.convert import convert

    content = convert(model.proto, dims) if isinstance(model, OnnxModel) else model.content
    return _quantizer(model, content, dims).build(form)


def _quantizer(
    model: Model, content: bytes, dims: Mapping[str, int], *, threads: int = 1, codes: Scheme = scheme.LITERT
) -> Quantizer:
    from edgekit_toolkit.quantize.litert.quantizer import CompressedFloats, LiteRtQuantizer
    from edgekit_toolkit.tflite.convert import convert

    if not isinstance(model, OnnxModel):
        return LiteRtQuantizer(content, threads=threads, scheme=codes)
    proto = model.proto

    def compress(form: Form) -> CompressedFloats:
        floats = forms.compressed_floats(proto, form)
        scales = {} if form.compression is None else form.compression.scales_of_outputs(floats)
        return CompressedFloats(convert(floats, dims), scales)

    return LiteRtQuantizer(content, threads=threads, scheme=codes, compress=compress)


def _convert(model: onnx.ModelProto) -> Model:
    from edgekit_toolkit.models.tflite import TfliteModel
    from edgekit_toolkit.tflite.convert import convert

    return TfliteModel(convert(model, {}))


def _convert_codes(_coded: onnx.ModelProto, floats: onnx.ModelProto) -> Model:
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer

    quantizer = LiteRtQuantizer(_convert(floats).content, threads=1)
    kernels = quantizer.kernels(elementwise=True)
    feeds = generate_feeds(quantizer.model.specs()[0], 1, 0)
    ranges = quantizer.ranges(kernels, lambda: iter(feeds), lambda: None)
    plan = Plan(quantizer.scheme, frozenset(kernels), dict.fromkeys(ranges, _CODES_RANGE))
    return quantizer.writer({})(plan)


SUPPORT: Final = register_support(
    EngineSupport(
        name=LITERT.name,
        maker=ModelMaker(
            open_quantizer=_open_quantizer,
            build=_build,
            convert=_convert,
            convert_codes=_convert_codes,
            codes_tool="ai-edge-quantizer",
            fixes_sizes=True,
        ),
        kinds=frozenset(forms.KINDS) - {forms.BFLOAT16_ARITHMETIC},
        tools=("ai-edge-litert", "ai-edge-quantizer", "flatbuffers"),
        judged_on=LITERT.name,
        shares_cores=False,
        slows_exact_products=False,
        cheap_row_macs=5e6,
        untimed={
            forms.FLOAT16_ARITHMETIC: UntimedForm(
                label="half-precision arithmetic", isa="fp16", check=find_emulated_python
            )
        },
    )
)
