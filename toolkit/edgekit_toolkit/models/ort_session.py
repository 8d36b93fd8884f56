"""Opens ONNX Runtime sessions on the host, and translates exceptions of ONNX Runtime."""

from collections.abc import Sequence
from typing import Any

import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper

from edgekit_runtime.errors import BackendError
from edgekit_runtime.sessions.ort import WRONG_REWRITES
from edgekit_runtime.sessions.ort_products import open_exact
from edgekit_toolkit.onnx_graph.index import copy_model
from edgekit_toolkit.onnx_graph.ort_options import ort_options, stated_options
from edgekit_toolkit.openings.model_opening import check_opening
from edgekit_toolkit.samples.generated import Feeds

# Only errors about unusable graphs or nodes. Other messages (warnings of fallbacks) are noise here.
_LOG_FATAL = 4


def session_for(model: onnx.ModelProto, *, threads: int, optimise: bool = True) -> ort.InferenceSession:
    """Open a model in an ONNX Runtime session on the CPU, with the options in the model's metadata.

    Args:
        model: The model.
        threads: The number of threads of one inference.
        optimise: Whether ONNX Runtime optimises the graph. If not, 8-bit products are not exact on all
            processors.

    Raises:
        BackendError: ONNX Runtime refuses the model, or would crash on it.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = _LOG_FATAL
    # Many sessions are open at once here; idle threads that spin would take the cores from the one that runs.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    own = ort_options(model)
    if own.fold_weights:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    level = ort.GraphOptimizationLevel
    optimise = optimise and own.optimise
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    disabled = [*WRONG_REWRITES, *own.disabled_optimizers]
    content = model.SerializeToString()
    check_opening("ort", content, stated_options(model) if optimise else {"optimise": False})
    try:
        return open_exact(
            options,
            lambda how: ort.InferenceSession(
                content, how, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
            ),
            is_narrow=own.narrow_weights,
        )
    except Exception as error:  # onnxruntime raises classes of its own that share no base but Exception
        raise BackendError(f"onnxruntime refuses the model: {error}") from error


def run_session(
    session: ort.InferenceSession, feeds: Feeds, names: Sequence[str] | None = None
) -> list[NDArray[Any]]:
    """Run a session on one batch, and return the outputs `names`, or all outputs in the order of the model.

    Raises:
        BackendError: ONNX Runtime fails on the inputs.
    """
    try:
        results: list[NDArray[Any]] = session.run(list(names) if names is not None else None, feeds)
    except Exception as error:
        raise BackendError(f"onnxruntime cannot run the model: {error}") from error
    return results


def measure_shapes(model: onnx.ModelProto, feeds: Feeds, *, threads: int) -> dict[str, tuple[int, ...]]:
    """Run a model once, and return a dict from the name of each tensor to its shape, including constants.

    Raises:
        BackendError: ONNX Runtime refuses the model or fails on the inputs.
    """
    copy = copy_model(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del copy.graph.output[:]
    for number, name in enumerate(names):
        shape = f"edgekit_shape_{number}"
        copy.graph.node.append(helper.make_node("Shape", [name], [shape]))
        copy.graph.output.append(helper.make_tensor_value_info(shape, TensorProto.INT64, None))
    session = session_for(copy, threads=threads)
    values = run_session(session, feeds, [value.name for value in copy.graph.output])
    shapes = {name: tuple(map(int, value)) for name, value in zip(names, values, strict=True)}
    shapes |= {name: tuple(value.shape) for name, value in feeds.items()}
    return shapes | {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
