"""The calibration networks as models of an engine: ONNX, or converted and quantized for LiteRT."""

import contextlib
import functools
from collections.abc import Mapping
from importlib import metadata

import onnx

from edgekit_toolkit.measurement.calibration_networks import (
    INT8_SUFFIX,
    digest_calibration_networks,
    make_calibration_networks,
)
from edgekit_toolkit.models.model import Engine, Model
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.samples.generated import generate_feeds

_RANGE = (-8.0, 8.0)  # of all 8-bit codes; the values do not matter


@functools.cache
def make_calibration_models(engine: Engine) -> Mapping[str, Model]:
    """Return the networks by name.

    Raises:
        EngineMissingError: LiteRT or ai-edge-quantizer is not installed, for LiteRT.
    """
    networks = make_calibration_networks()
    if engine == "ort":
        return {name: OnnxModel(network) for name, network in networks.items()}
    return {
        name: _write_tflite(networks[name.removesuffix(INT8_SUFFIX)], codes=name.endswith(INT8_SUFFIX))
        for name in networks
    }


def digest_calibration_models(engine: Engine) -> str:
    """Return the digest of this release's networks for an engine.

    Files for LiteRT differ between releases of ai-edge-quantizer, which belongs to it therefore.
    """
    digest = digest_calibration_networks()
    if engine == "ort":
        return digest
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{digest} by ai-edge-quantizer {metadata.version('ai-edge-quantizer')}"
    return f"{digest} by nothing"


def _write_tflite(network: onnx.ModelProto, *, codes: bool) -> Model:
    from edgekit_toolkit.quantize.litert.quantizer import LiteRtQuantizer
    from edgekit_toolkit.quantize.plan import Plan
    from edgekit_toolkit.tflite.convert import convert

    quantizer = LiteRtQuantizer(convert(network, {}), threads=1)
    if not codes:
        return quantizer.model
    kernels = quantizer.kernels(elementwise=True)
    feeds = generate_feeds(quantizer.model.specs()[0], 1, 0)
    ranges = quantizer.ranges(kernels, lambda: iter(feeds), lambda: None)
    return quantizer.writer({})(Plan(quantizer.scheme, frozenset(kernels), dict.fromkeys(ranges, _RANGE)))
