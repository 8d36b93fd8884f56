"""The calibration networks as models of an engine: ONNX, or converted and quantized for LiteRT."""

import contextlib
import functools
from collections.abc import Mapping
from importlib import metadata

from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.measurement.calibration_networks import (
    INT8_SUFFIX,
    digest_calibration_networks,
    make_calibration_networks,
)
from edgekit_toolkit.models.model import Model


@functools.cache
def make_calibration_models(engine: str) -> Mapping[str, Model]:
    """Return the networks by name.

    Raises:
        EngineMissingError: LiteRT or ai-edge-quantizer is not installed, for LiteRT.
    """
    networks, support = make_calibration_networks(), find_support(engine)
    return {
        name: support.convert_codes(network, networks[name.removesuffix(INT8_SUFFIX)])
        if name.endswith(INT8_SUFFIX)
        else support.convert(network)
        for name, network in networks.items()
    }


def digest_calibration_models(engine: str) -> str:
    """Return the digest of this release's networks for an engine.

    Files for LiteRT differ between releases of ai-edge-quantizer, which belongs to it therefore.
    """
    digest, tool = digest_calibration_networks(), find_support(engine).calibration_tool
    if not tool:
        return digest
    with contextlib.suppress(metadata.PackageNotFoundError):
        return f"{digest} by {tool} {metadata.version(tool)}"
    return f"{digest} by nothing"
