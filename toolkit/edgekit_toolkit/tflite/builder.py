"""Builds the TFLite graph from tensors, constants and operators. `writer` serialises it."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from edgekit_toolkit.tflite.kernel_types import CAST_ONLY
from edgekit_toolkit.tflite.layout.forms import Shape
from edgekit_toolkit.tflite.refusal import RefusedError

# Element types of tensors. The values are TFLite's names. `kernel_types` says which of them compute.
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


# Kernels that compute take 8 and 16 bits for codes with a scale. Without a scale some of them end the
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
    """A tensor of the TFLite graph.

    Attributes:
        shape: The sizes of the axes in the order of the stored tensor, see `layout.forms`.
        name: The name in the file, or an empty string before it is known.
        data: The values of a constant, or None for a computed tensor.
    """

    index: int
    shape: Shape
    dtype: "np.dtype[Any]"
    name: str = ""
    data: NDArray[Any] | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """The options of an operator: the name of a schema table, and the fields that are not the default."""

    table: str
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator of the TFLite graph.

    Attributes:
        kind: The name in the schema's `BuiltinOperator`.
        inputs: The input tensors, with None for an omitted input.
        version: The lowest operator version with the features that are used.
    """

    kind: str
    inputs: tuple[Tensor | None, ...]
    outputs: tuple[Tensor, ...]
    options: Options | None
    version: int


class Builder:
    """Builds the TFLite graph. Equal constants are stored once.

    Attributes:
        operations: The operators in order of execution.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.operations: list[Operation] = []
        self._constants: dict[tuple[str, Shape, bytes], Tensor] = {}

    def tensor(self, shape: Sequence[int], dtype: "np.dtype[Any]", name: str = "") -> Tensor:
        """Add and return a tensor without values. It is an input of the model or the result of an operator.

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
        """Return a constant tensor with a value. Equal values share one tensor. See `tensor` for errors."""
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
        """Add an operator, and return its new output tensors.

        `kind` is its name in `BuiltinOperator`. `outputs` are the shape and dtype of each output.

        Raises:
            RefusedError: The operator does not support an element type, or an output is not supported, see
                `tensor`.
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
        """Return a tensor in another shape. A RESHAPE is added if a computed tensor changes its shape."""
        shape = tuple(int(size) for size in shape)
        if shape == tensor.shape:
            return tensor
        if tensor.data is not None:
            return self.constant(tensor.data.reshape(shape), tensor.name)
        return self.copy(tensor, shape)

    def copy(self, tensor: Tensor, shape: Shape) -> Tensor:
        """Add a RESHAPE, even if the shape stays the same, and return the new tensor."""
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
        """Return the tensor with its axes in another order. A TRANSPOSE is added for a computed tensor."""
        shape = tuple(tensor.shape[axis] for axis in order)
        if tensor.data is not None:
            return self.constant(tensor.data.transpose(order), tensor.name)
        axes = self.constant(np.array(order, np.int32))
        quantized = self.operator(
            "TRANSPOSE", [tensor, axes], [(shape, tensor.dtype)], Options("TransposeOptions")
        )
        return quantized[0]
