"""The model that a package holds, whatever its kind: an ONNX model, or the content of a `.tflite` file.

What differs between the kinds beside quantization is here, so that judge, packer and report need not ask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import onnx
from numpy.typing import NDArray

from edgekit_runtime.sessions import Session
from edgekit_runtime.sessions.ort import OrtSession
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.measurement.peak_memory import Engine, PeakMemory, measure_peak_memory
from edgekit_toolkit.onnx_graph.ort_options import ort_options, stated_options
from edgekit_toolkit.onnx_graph.shapes import dynamic_dims
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.onnx_graph.traversal import computes_in_integers
from edgekit_toolkit.quantize.engine import run_session, session_for
from edgekit_toolkit.quantize.quantizer import Runner
from edgekit_toolkit.samples.generated import Feeds

Model: TypeAlias = onnx.ModelProto | bytes


def engine_of(model: Model) -> Engine:
    """Return the engine that runs the model on this machine."""
    return "litert" if isinstance(model, bytes) else "ort"


def path_of(model: Model) -> str:
    """Return the path of the model's artifact in a package."""
    return "model.tflite" if isinstance(model, bytes) else "model.onnx"


def content_of(model: Model) -> bytes:
    """Return the bytes of the model's artifact."""
    return model if isinstance(model, bytes) else model.SerializeToString(deterministic=True)


def specs_of(
    model: Model, outputs: Sequence[str] | None = None
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return what the model takes and gives, the outputs in the order of the names `outputs` if given.

    Raises:
        BackendError: LiteRT refuses the model.
    """
    if not isinstance(model, bytes):
        return tensor_specs(model)
    from edgekit_runtime.sessions.litert.session import LiteRtSession

    session = LiteRtSession(model)
    try:
        named = {spec.name: spec for spec in session.outputs}
        return session.inputs, tuple(named[name] for name in outputs or named)
    finally:
        session.close()


def open_model(model: Model, outputs: Sequence[str], *, threads: int) -> Runner:
    """Return a call that runs the model here and gives the outputs of these names, in this order.

    Raises:
        BackendError: the engine refuses the model.
    """
    if not isinstance(model, bytes):
        return partial(run_session, session_for(model, threads=threads), names=list(outputs))
    session = open_session(model, threads=threads)

    def run(feeds: Feeds) -> list[NDArray[Any]]:
        made = session.run(feeds)
        return [made[name] for name in outputs]

    return run


def open_reference(model: Model, outputs: Sequence[str], *, threads: int) -> Runner:
    """Return a call as of `open_model` that no rewrite of the engine's optimiser changes.

    A model that multiplies codes is optimised all the same: its products are exact everywhere only then.

    Raises:
        BackendError: the engine refuses the model.
    """
    if isinstance(model, bytes):
        return open_model(model, outputs, threads=threads)
    session = session_for(model, threads=threads, optimise=computes_in_integers(model))
    return partial(run_session, session, names=list(outputs))


def open_session(model: Model, *, threads: int) -> Session:
    """Return the session that a device would open.

    Raises:
        BackendError: the engine refuses the model.
    """
    if isinstance(model, bytes):
        from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession

        return LiteRtSession(model, LiteRtOptions(threads=threads))
    return OrtSession(content_of(model), replace(ort_options(model), threads=threads))


def peak_memory_of(model: Model, feeds: Feeds) -> PeakMemory:
    """Return the peak memory of a fresh process here that opens the model as a device would, and runs it.

    Raises:
        BackendError: as for `measure_peak_memory`.
    """
    options = {} if isinstance(model, bytes) else stated_options(model)
    return measure_peak_memory(content_of(model), feeds, engine=engine_of(model), options=options)


def computes_in_codes(model: Model) -> bool:
    """Whether the model computes with 8-bit codes anywhere, those that it makes at run time included."""
    if not isinstance(model, bytes):
        return computes_in_integers(model)
    from edgekit_toolkit.tflite.flatbuffer import parsed
    from edgekit_toolkit.tflite.summary import DYNAMIC, summarise

    summary = summarise(parsed(model))
    dynamic = any(layer.precision == DYNAMIC for layer in summary.layers.values())
    return dynamic or summary.integer_operators > 0


def work_of(model: Model, dims: Mapping[str, int], *, float_outputs: bool = False) -> list[NodeCost]:
    """Return the work of each kernel of one inference.

    Args:
        model: any kind.
        dims: sizes of free dimensions.
        float_outputs: as for `node_costs`.

    Raises:
        ModelError: the work cannot be counted.
    """
    if not isinstance(model, bytes):
        return node_costs(model, _bound(model, dims), float_outputs=float_outputs)
    from edgekit_toolkit.costs.tflite_operators import tflite_costs
    from edgekit_toolkit.tflite.flatbuffer import parsed

    return tflite_costs(parsed(model), dims)


def _bound(model: onnx.ModelProto, dims: Mapping[str, int]) -> dict[str, int]:
    return {name: dims.get(name, dims.get(name.replace(":", "_"), 1)) for name in dynamic_dims(model)}
