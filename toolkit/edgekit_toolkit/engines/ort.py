"""Packages for onnxruntime: ONNX models that are quantized by our own writer."""

from collections.abc import Mapping
from typing import Final

import onnx

from edgekit_runtime.engines.ort import ORT
from edgekit_runtime.errors import ModelError
from edgekit_toolkit.engines.record import EngineSupport, ModelMaker, register_support
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize import forms, scheme
from edgekit_toolkit.quantize.forms import Form
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.targets.spec import Target


def _open_quantizer(model: Model, target: Target, *, threads: int, **_conversion: object) -> Quantizer:
    exact, proto = scheme.ASYMMETRIC, require_onnx(model).proto
    if target.quantization.reduce_range:
        return OnnxQuantizer(proto, scheme.ASYMMETRIC_7BIT, threads=threads, wider=exact)
    return OnnxQuantizer(proto, exact, threads=threads)


def build_onnx(model: Model, form: Form, _dims: Mapping[str, int]) -> Model | None:
    built = forms.build(require_onnx(model).proto, form)
    return None if built is None else OnnxModel(built)


def take_codes(coded: onnx.ModelProto, _floats: onnx.ModelProto) -> Model:
    return OnnxModel(coded)


def require_onnx(model: Model) -> OnnxModel:
    """Return the model if it is an ONNX model.

    Raises:
        ModelError: The model is a `.tflite` model.
    """
    if not isinstance(model, OnnxModel):
        raise ModelError("a .tflite model runs on LiteRT alone; give the model as ONNX")
    return model


SUPPORT: Final = register_support(
    EngineSupport(
        name=ORT.name,
        maker=ModelMaker(
            open_quantizer=_open_quantizer,
            build=build_onnx,
            convert=OnnxModel,
            convert_codes=take_codes,
        ),
        kinds=frozenset(forms.KINDS) - {forms.BFLOAT16_ARITHMETIC},
        judged_on=ORT.name,
        competes=True,
    )
)
