"""Checks that TensorRT accepts a model, on a machine without a GPU.

The check uses TensorRT-RTX, whose ONNX parser and builder run on the CPU. It shows that every node is
supported and that an engine can be built. It does not run the engine, so it says nothing about speed and
accuracy. docs/reference/tensorrt.md lists the forms that pass, and docs/adr/0004-tensorrt-check.md describes
what the check proves.

No precision can be chosen, because TensorRT-RTX takes the type of every tensor from the model.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import onnx

from edgekit_runtime.sessions.tensorrt.options import Precision, Shapes, TensorRtOptions
from edgekit_runtime.system.child_process import ChildProcess
from edgekit_runtime.system.install_hint import python_here
from edgekit_toolkit.onnx_graph.index import attribute
from edgekit_toolkit.onnx_graph.traversal import bodies, nodes, stored_tensors

VERSION: Final = "1.7.1.116"
INSTALL_COMMAND: Final = (
    f"{python_here()} -m pip install --no-deps tensorrt_rtx_cu13_libs=={VERSION}"
    f" tensorrt_rtx_cu13_bindings=={VERSION}"
)

_LIBRARY: Final = "tensorrt_rtx_bindings"
# Compute capability 8.6 is the Ampere GPU nearest to 8.7 of Jetson Orin, which TensorRT-RTX does not offer.
_COMPUTE_CAPABILITY: Final = "SM86"
# With this the builder changes no type of the model, see `TensorRtOptions.precisions`.
_AS_IT_IS: Final[Precision] = "int8"
_IMPORT_ERRORS: Final = ("ImportError: ", "ModuleNotFoundError: ")
_INTERNAL: Final = "Internal Error"  # errors of TensorRT's builder, in passes that know no node names


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRtCheck:
    """TensorRT's verdict on a model.

    Attributes:
        errors: The reasons why the model is not accepted, with operator, node name and message. If an engine
            was built, each error names a node whose results in TensorRT differ from those of ONNX.
        available: Whether the library is installed. If not, `errors` has the command that installs it.
        parsed: Whether the parser supports every node.
        engine_bytes: The size of the engine, or None if none was built.
        version: The version of the library, or None if it gave no answer.
        seconds: The time to parse and build, or None if the library gave no answer.
    """

    errors: tuple[str, ...]
    available: bool = True
    parsed: bool = False
    built: bool = False
    engine_bytes: int | None = None
    version: str | None = None
    seconds: float | None = None

    @property
    def accepted(self) -> bool:
        """Whether an engine was built that computes the same as the model."""
        return self.built and not self.errors


def check_tensorrt(
    content: bytes,
    *,
    shapes: Mapping[str, Shapes] | None = None,
    time_limit_s: float = 300.0,
) -> TensorRtCheck:
    """Return TensorRT's verdict on an ONNX model. A refusal, crash or timeout does not raise an exception.

    The library runs in a child process, because a native crash ends its process.

    Args:
        content: The content of the model file, including weights (no external data).
        shapes: The shapes of the inputs with free dimensions, see `TensorRtOptions`.
        time_limit_s: The time after which the process is killed.

    Raises:
        ValueError: The shapes of an input are not in ascending order, or have different ranks.
    """
    request = {
        "library": _LIBRARY,
        "compute_capability": _COMPUTE_CAPABILITY,
        **TensorRtOptions(precisions=(_AS_IT_IS,), shapes=shapes or {}).to_json(),
    }
    with tempfile.TemporaryDirectory(prefix="edgekit-tensorrt-") as name:
        folder = Path(name)
        (folder / "model.onnx").write_bytes(content)
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        with ChildProcess("edgekit_runtime.sessions.tensorrt.child", folder=folder) as child:
            code, last_line, end = child.wait(time_limit_s), child.last_line, child.explain_end()
        if code is None:
            error = (
                f"TensorRT gave no answer within {time_limit_s:g} s; raise the time limit or shrink the model"
            )
            return TensorRtCheck(errors=(error,))
        if code and last_line.startswith(_IMPORT_ERRORS):
            error = f"TensorRT is not installed ({last_line}); install it with: {INSTALL_COMMAND}"
            return TensorRtCheck(errors=(error,), available=False)
        if code:
            return TensorRtCheck(errors=(f"TensorRT ended {end}",))
        answer: dict[str, Any] = json.loads((folder / "answer.json").read_text(encoding="utf-8"))
        plan = folder / f"{_AS_IT_IS}.plan"
        engine_bytes = plan.stat().st_size if plan.exists() else None
    errors = tuple(error for messages in answer["refused"].values() for error in messages)
    if parsed := "model" not in answer["refused"]:
        model = onnx.load_model_from_string(content)
        errors = _with_suspects(errors, model) if errors else tuple(_misread_quantizers(model))
    return TensorRtCheck(
        errors=errors,
        parsed=parsed,
        built=engine_bytes is not None,
        engine_bytes=engine_bytes,
        version=answer["version"],
        seconds=answer["seconds"],
    )


def _with_suspects(errors: tuple[str, ...], model: onnx.ModelProto) -> tuple[str, ...]:
    """Return the builder's errors; an internal error names no node, so the model's control flow is added.

    TensorRT-RTX 1.7 takes conditions and loops apart before it looks for kernels, and fails there without
    naming the place.
    """
    operators = [
        f"operator '{node.op_type}' at node '{node.name}'" for node in model.graph.node if bodies(node)
    ]
    if not operators or not any(_INTERNAL in error for error in errors):
        return errors
    return (f"{operators[0]} is control flow that its builder does not take: {errors[0]}", *errors[1:])


def _misread_quantizers(model: onnx.ModelProto) -> Iterator[str]:
    """Name the nodes that quantize to uint8.

    TensorRT-RTX 1.7 takes them for int8: it builds the same engine, byte for byte, as for an int8 zero point,
    and so clips every value over 127 steps, where ONNX keeps 255.
    """
    types = {name: tensor.data_type for name, tensor in stored_tensors(model)}
    for node in nodes(model):
        if node.op_type != "QuantizeLinear":
            continue
        zero_point = node.input[2] if len(node.input) > 2 else ""
        # ONNX: without a zero point the attribute decides, and without both the type is uint8.
        fallback = attribute(node, "output_dtype", 0) or onnx.TensorProto.UINT8
        if (types.get(zero_point) if zero_point else fallback) == onnx.TensorProto.UINT8:
            yield f"QuantizeLinear '{node.name}': quantizes to uint8, which TensorRT reads as int8"
