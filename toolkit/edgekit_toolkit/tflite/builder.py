"""The TFLite graph while it grows: tensors, constants and operators, without their serialisation."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.kernel_types import CAST_ONLY
from edgekit_toolkit.tflite.layout.forms import Shape
from edgekit_toolkit.tflite.refusal import RefusedError

# Element types of tensors; the values are TFLite's names. `kernel_types` says which of them compute.
TENSOR_TYPES: Final[Mapping[str, str]] = {
    "float16": "FLOAT16",
    "float32": "FLOAT32",
    "float64": "FLOAT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "bool": "BOOL",
}


# Kernels that compute take 8 and 16 bits for codes with a scale; without a scale some of them end the
# process. These only move elements.
CODE_TYPES: Final = frozenset({"int8", "int16", "uint8"})
MOVING_KINDS: Final = frozenset(
    {
        "BITCAST",
        "BROADCAST_TO",
        "CAST",
        "CONCATENATION",
        "DEPTH_TO_SPACE",
        "GATHER",
        "GATHER_ND",
        "PAD",
        "RESHAPE",
    }
    | {"SELECT_V2", "SLICE", "SPACE_TO_DEPTH", "SPLIT", "SPLIT_V", "STRIDED_SLICE", "TILE", "TRANSPOSE"}
)


@dataclass(slots=True)
class Tensor:
    """One tensor of the TFLite graph.

    Attributes:
        shape: sizes of the axes in the order in which they are held, see `layout.forms`.
        name: name in the file, set when a tensor becomes a value of the model.
        data: values of a constant; None for a tensor that is computed.
    """

    index: int
    shape: Shape
    dtype: "np.dtype[Any]"
    name: str = ""
    data: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an operator: the schema's table, and the fields (name -> value) that are not default."""

    table: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """One operator of the TFLite graph.

    Attributes:
        kind: name in the schema's `BuiltinOperator`.
        inputs: input tensors; None for an input that is left out.
        version: lowest version of the operator that has the features in use.
    """

    kind: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: Options | None
    version: int


class Builder:
    """Collects the TFLite graph; equal constants are kept once.

    Attributes:
        operations: operators in the order in which they run.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self._constants: dict[tuple[str, Shape, bytes], Tensor] = {}

    def tensor(self, shape: Sequence[int], dtype: "np.dtype[Any]", name: str = "") -> Tensor:
        """Add a tensor without values, which an operator or a caller of the model fills, and return it.

        Raises:
            RefusedError: TFLite has no kernels for the element type, or the tensor has no elements.
        """
        shape = tuple(int(size) for size in shape)
        if dtype.name not in TENSOR_TYPES:
            raise RefusedError(f"element type {dtype.name} is not computed in TFLite; export with float32")
        if 0 in shape:
            raise RefusedError(
                f"a tensor of shape {list(shape)} has no elements, which TFLite does not compute"
            )
        tensor = Tensor(len(self.tensors), shape, dtype, name)
        self.tensors.append(tensor)
        return tensor

    def constant(self, value: NDArray[Any], name: str = "") -> Tensor:
        """Return the tensor of a constant, shared by equal constants. Raises as `tensor` does."""
        value = np.array(value, order="C")  # a copy that keeps rank 0, which ascontiguousarray does not
        key = (value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).digest())
        if key not in self._constants:
            tensor = self.tensor(value.shape, value.dtype, name)
            tensor.data = value
            self._constants[key] = tensor
        return self._constants[key]

    def operator(
        self,
        kind: str,
        inputs: Sequence[Tensor | None],
        outputs: Sequence[tuple[Sequence[int], "np.dtype[Any]"]],
        options: Options | None = None,
        version: int = 1,
    ) -> tuple[Tensor, ...]:
        """Add an operator; return its new output tensors.

        `kind`: name in `BuiltinOperator`. `outputs`: shape and dtype of each. `version`: see `Operation`.

        Raises:
            RefusedError: TFLite's operator does not take an element type, or `tensor` refuses an output.
        """
        dtypes = [tensor.dtype.name for tensor in inputs if tensor is not None]
        dtypes += [dtype.name for _, dtype in outputs]
        moved_only = CAST_ONLY.intersection(dtypes)
        if moved_only and kind not in {"BITCAST", "CAST", "RESHAPE"}:
            raise RefusedError(f"TFLite's {kind} does not take {', '.join(sorted(moved_only))}")
        codes = CODE_TYPES.intersection(dtypes)
        if codes and kind not in MOVING_KINDS:
            raise RefusedError(f"TFLite's {kind} takes {', '.join(sorted(codes))} for quantized numbers only")
        results = tuple(self.tensor(shape, dtype) for shape, dtype in outputs)
        self.operations.append(Operation(kind, tuple(inputs), results, options, version))
        return results

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """Return `tensor` in another shape: by a RESHAPE or as a new constant; unchanged if it is equal."""
        shape = tuple(int(size) for size in shape)
        if shape == tensor.shape:
            return tensor
        if tensor.data is not None:
            return self.constant(tensor.data.reshape(shape), tensor.name)
        return self.copy(tensor, shape)

    def copy(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Add a RESHAPE, even to the same shape; return its result, a new tensor with the same bytes."""
        if (
            not shape
        ):  # an empty list of sizes would be a tensor without elements; the kernel takes [0] for it
            return self.operator(
                "RESHAPE", [tensor], [((), tensor.dtype)], Options("ReshapeOptions", {"newShape": [0]})
            )[0]
        sizes = self.constant(np.array(shape, np.int32))
        options = Options("ReshapeOptions", {"newShape": list(shape)})
        return self.operator("RESHAPE", [tensor, sizes], [(shape, tensor.dtype)], options)[0]

    def transpose(self, tensor: Tensor, order: Sequence[int]) -> Tensor:
        """Return the tensor with its axes in another order, `order`: by a TRANSPOSE, or as a new constant."""
        shape = tuple(tensor.shape[axis] for axis in order)
        if tensor.data is not None:
            return self.constant(tensor.data.transpose(order), tensor.name)
        axes = self.constant(np.array(order, np.int32))
        quantized = self.operator(
            "TRANSPOSE", [tensor, axes], [(shape, tensor.dtype)], Options("TransposeOptions")
        )
        return quantized[0]
