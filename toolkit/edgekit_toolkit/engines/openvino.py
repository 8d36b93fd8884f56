"""Packages for OpenVINO: ONNX models that are quantized by our own writer and evaluated on OpenVINO."""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import onnx

from edgekit_runtime.engines.openvino import OPENVINO
from edgekit_runtime.sessions.openvino import computes_bfloat16
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_toolkit.engines.ort import require_onnx
from edgekit_toolkit.engines.record import EngineSupport, ModelMaker, register_support
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.models.openvino import BFloat16Model, OpenVinoModel
from edgekit_toolkit.passes import write_hardswish
from edgekit_toolkit.quantize import forms, scheme
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.targets.spec import Target


class _OpenVinoQuantizer(OnnxQuantizer):
    def build(self, form: Form) -> OnnxModel | None:
        built = super().build(form)
        return None if built is None else _model_of(built.proto, form)

    def why_no_static_int8(self) -> str | None:
        """Return why no static int8 form is made: its outputs on the target may differ from those here."""
        if saturates() and not self.scheme.is_narrow:
            return (
                "OpenVINO's 8-bit products saturate on this machine, which has no VNNI; package on one that"
                " has, or for x86-64-avx2, whose weights have 7 bits"
            )
        return super().why_no_static_int8()

    def wrong_rewrites(self, form: Form, noise: Callable[[Model], float]) -> None:
        """None: the rewrites to look for are onnxruntime's."""


def _floats(model: Model) -> onnx.ModelProto:
    return write_hardswish.run(require_onnx(model).proto)


def _model_of(built: onnx.ModelProto, form: Form) -> OpenVinoModel:
    return BFloat16Model(built) if form.kind == forms.BFLOAT16_ARITHMETIC else OpenVinoModel(built)


def _open_quantizer(model: Model, target: Target, *, threads: int, **_conversion: object) -> Quantizer:
    codes = scheme.OPENVINO_7BIT if target.quantization.reduce_range else scheme.OPENVINO
    quantizer = _OpenVinoQuantizer(_floats(model), codes, threads=threads, make=OpenVinoModel)
    if _allows_bfloat16(quantizer.model, target):
        quantizer.labels = {**quantizer.labels, forms.BFLOAT16_ARITHMETIC: "bfloat16 arithmetic"}
    return quantizer


def _allows_bfloat16(model: OnnxModel, target: Target) -> bool:
    """Return whether the target may have bfloat16, and passes the self-test where it lacks it.

    Integers, such as the classes of an ArgMax, have no tolerance that would allow float32 instead.
    """
    gives_floats = all(np.dtype(spec.dtype).kind == "f" for spec in model.specs()[1])
    return gives_floats and "avx512" in target.cpu.isa and computes_bfloat16()


def _build(model: Model, form: Form, _dims: Mapping[str, int]) -> Model | None:
    built = forms.build(_floats(model), form)
    return None if built is None else _model_of(built, form)


def _take_codes(coded: onnx.ModelProto, _floats: onnx.ModelProto) -> Model:
    return OpenVinoModel(coded)


SUPPORT: Final = register_support(
    EngineSupport(
        name=OPENVINO.name,
        maker=ModelMaker(
            open_quantizer=_open_quantizer,
            build=_build,
            convert=OpenVinoModel,
            convert_codes=_take_codes,
        ),
        kinds=frozenset(
            {
                forms.FLOAT32,
                forms.FLOAT16_WEIGHTS,
                forms.BFLOAT16_ARITHMETIC,
                forms.INT8_WEIGHTS,
                forms.STATIC_INT8,
            }
        ),
        tools=("openvino",),
        judged_on=OPENVINO.name,
        competes=True,
        slows_exact_products=False,
    )
)
