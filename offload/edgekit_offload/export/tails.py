"""Extracts the models that a server needs for the plans of a package.

In the package, tails share the weights of the whole model. Here each tail gets its own weights, because other
servers have a separate folder for each model.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import onnx

from edgekit_offload.packaging.submodels import fill_weights
from edgekit_runtime.errors import CutError, OutputError
from edgekit_runtime.offload.cut_table import read_cut_table
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.row_independence import rows_are_independent
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.tensors import DTYPES, TensorSpec

_LARGEST_MODEL_BYTES: Final = 1_900_000_000  # protobuf's limit is 2 GiB. A file beside it has larger weights
_WEIGHTS_FILE: Final = "weights.bin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tail:
    """A model for a server.

    Attributes:
        inputs, outputs: The tensors of the model. An input in `decode` is sent as an encoded file.
        decode: A dict from the name of an input to `jpeg`, `webp` or `opus`.
        model: The graph with its weights.
        is_batched: Whether a server may batch requests. This requires that the rows of a batch do not affect
            each other.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    decode: dict[str, str]
    model: onnx.ModelProto
    is_batched: bool

    @property
    def request_bytes(self) -> int:
        """The size of all inputs in bytes. Free dimensions, such as the batch, count as 1."""
        total = 0
        for spec in self.inputs:
            size = DTYPES[spec.dtype].itemsize
            for dimension in spec.shape:
                size *= dimension if isinstance(dimension, int) else 1
            total += size
        return total

    def write(self, path: Path) -> None:
        """Write the model to `path`. If it is too large for one file, its weights are written beside it.

        Raises:
            OutputError: A file cannot be written.
        """
        is_large = self.model.ByteSize() > _LARGEST_MODEL_BYTES
        try:
            onnx.save_model(self.model, path, save_as_external_data=is_large, location=_WEIGHTS_FILE)
        except OSError as cause:
            raise OutputError(f"{path}: cannot be written: {cause}") from cause


def find_tails(package: OpenedPackage) -> tuple[Tail, ...]:
    """Return the models that a package needs on a server. Without a cut table, this is the whole model.

    Raises:
        CutError: A plan needs a model that is not in the package or is not ONNX.
        BackendError: A tail does not run on this machine.
    """
    whole = package.manifest
    table = read_cut_table(package)
    if table is None:
        return (_open_tail(package, whole),)
    submodels = [package.select_submodel(submodel.name) for submodel in whole.submodels]
    named = {opened.manifest.name: opened for opened in submodels} | {whole.name: package}
    tail_names = sorted({plan.tail for plan in table.plans if plan.tail is not None})
    missing = [name for name in tail_names if name not in named]
    if missing or not tail_names:
        lack = f"has no model {', '.join(missing)}" if missing else "has no plan that sends anything"
        raise CutError(f"{package.path}: {lack}; there is nothing to serve, plan the model again")
    return tuple(_open_tail(named[name], named[name].manifest) for name in tail_names)


def _open_tail(package: OpenedPackage, manifest: Manifest) -> Tail:
    """Return the tail that `manifest` describes as if it were the whole model."""
    choice = next((choice for choice in manifest.backend.chain if choice.artifact.endswith(".onnx")), None)
    if choice is None:
        raise CutError(
            f"{package.path}: '{manifest.name}' runs {manifest.backend.artifact}, and only ONNX models can "
            "be exported; use edgekit offload serve, or package the model for onnxruntime"
        )
    weights = choice.options.get("weights")
    whole = package.read(weights) if isinstance(weights, str) else b""
    model, _ = fill_weights(bytes(package.read(choice.artifact)), whole)
    decode = choice.options.get("decode")
    media = {str(name): str(codec) for name, codec in decode.items()} if isinstance(decode, dict) else {}
    is_batched = not media and _can_batch(package)
    return Tail(
        name=manifest.name,
        inputs=manifest.inputs,
        outputs=manifest.outputs,
        decode=media,
        model=model,
        is_batched=is_batched,
    )


def _can_batch(package: OpenedPackage) -> bool:
    """Return whether the rows of a model's golden inputs do not change each other's answers.

    A tensor needs a dimension beside the batch, because Triton has no shape for a row without dimensions.
    """
    specs = (*package.manifest.inputs, *package.manifest.outputs)
    if any(len(spec.shape) < 2 for spec in specs) or len({spec.shape[0] for spec in specs}) != 1:
        return False
    with contextlib.closing(open_session(package)) as session:
        return rows_are_independent(session, read_golden_inputs(package))
