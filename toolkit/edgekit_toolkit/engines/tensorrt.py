"""Packages for TensorRT: ONNX models, which are evaluated on the fallback engine, onnxruntime."""

from typing import Final

from edgekit_runtime.engines.ort import ORT
from edgekit_runtime.engines.tensorrt import TENSORRT
from edgekit_toolkit.engines.ort import build_onnx, require_onnx, take_codes
from edgekit_toolkit.engines.record import EngineSupport, ModelMaker, register_support
from edgekit_toolkit.engines.tensorrt_check import TensorRtCheck, check_tensorrt
from edgekit_toolkit.models.model import Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize import forms
from edgekit_toolkit.quantize.onnx.quantizer import OnnxQuantizer
from edgekit_toolkit.quantize.quantizer import Quantizer
from edgekit_toolkit.quantize.scheme import SCHEMES
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.spec import Target


def _open_quantizer(model: Model, target: Target, *, threads: int, **_conversion: object) -> Quantizer:
    proto = require_onnx(model).proto
    return OnnxQuantizer(proto, SCHEMES[target.quantization.form], threads=threads)


def _check(model: Model, feeds: Feeds) -> TensorRtCheck:
    # The check needs the shapes of inputs that have free sizes beside the batch.
    shapes = {
        spec.name: (feeds[spec.name].shape,) * 3
        for spec in model.specs()[0]
        if any(isinstance(size, str) for size in spec.shape[1:])
    }
    return check_tensorrt(model.content, shapes=shapes)


SUPPORT: Final = register_support(
    EngineSupport(
        name=TENSORRT.name,
        maker=ModelMaker(
            open_quantizer=_open_quantizer,
            build=build_onnx,
            convert=OnnxModel,
            convert_codes=take_codes,
        ),
        # TensorRT takes none of the other forms (docs/reference/tensorrt.md).
        kinds=frozenset({forms.FLOAT32, forms.FLOAT16_WEIGHTS, forms.INT8_WEIGHTS, forms.STATIC_INT8}),
        judged_on=ORT.name,
        fallback=ORT.name,
        # The tolerances of further rows do not suit its arithmetic (TF32, fused int8).
        cheap_row_macs=None,
        check=_check,
        notes=(
            (
                "scores are judged with onnxruntime on this machine; TensorRT builds its engine on the device"
                " and may round differently"
            ),
            "memory is estimated for the onnxruntime fallback; TensorRT's CUDA context is not modelled",
        ),
    )
)
