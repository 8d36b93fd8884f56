"""Writes a model repository for Triton Inference Server, with a folder and configuration per tail.

Source: Triton Inference Server, docs/user_guide/model_configuration.md.
"""

import importlib.resources
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, TypeAlias

from edgekit_offload.export.tails import Tail
from edgekit_runtime.errors import CutError
from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.system.atomic_files import write_text_atomically
from edgekit_runtime.tensors import TensorSpec

TritonBackend: TypeAlias = Literal["onnxruntime", "python"]


@dataclass(frozen=True, slots=True)
class Accelerator:
    """The hardware and library that run the exported models.

    Attributes:
        is_gpu: True for a GPU, False for the processor.
        has_tensorrt: Whether Triton's backend `onnxruntime` uses TensorRT.
    """

    is_gpu: bool = False
    has_tensorrt: bool = False


PROCESSOR: Final = Accelerator()
MAX_BATCH: Final = 16
_QUEUE_DELAY_US: Final = 500  # time that a request waits for others: less than a network's round trip
# Triton's Python backend is built against numpy 1: with numpy 2 it answers 200 with an empty tensor.
_REQUIREMENTS: Final = "numpy>=1.24,<2\nonnxruntime>=1.17\n"
_GPU_REQUIREMENTS: Final = "numpy>=1.24,<2\nonnxruntime-gpu[cuda,cudnn]>=1.22\n"
# In float32: half precision would be another answer than the one that the plan was judged by.
_TENSORRT: Final = (
    'optimization { execution_accelerators { gpu_execution_accelerator [{ name: "tensorrt"'
    ' parameters { key: "precision_mode" value: "FP32" } }] } }'
)
_MEDIA_REQUIREMENTS: Final = "pillow>=11\nsoundfile>=0.13.1\n"
# Of edgekit's runtime, what reads photographs and sound, and what that imports.
_MEDIA_MODULES: Final = (
    "__init__.py",
    "canonical_json.py",
    "codecs/__init__.py",
    "codecs/media.py",
    "engines/__init__.py",
    "errors.py",
    "records.py",
    "system/__init__.py",
    "system/folder_modules.py",
    "system/install_hint.py",
    "tensors.py",
)


def write_repository(
    tails: tuple[Tail, ...], folder: Path, backend: TritonBackend, accelerator: Accelerator = PROCESSOR
) -> None:
    """Write a model repository.

    Args:
        tails: The models.
        folder: The folder of the repository, which is created.
        backend: The Triton backend that runs the tails. Only `python` can decode images and sound. It needs
            the packages in `requirements.txt`, which is written too.
        accelerator: The hardware that runs the tails.

    Raises:
        CutError: The backend cannot decode the images or sound that a tail needs, or has no TensorRT.
        OutputError: A file cannot be written.
    """
    if accelerator.has_tensorrt and backend == "python":
        raise CutError(
            "TensorRT is in Triton's onnxruntime backend; leave out --backend python or --tensorrt"
        )
    for tail in tails:
        if tail.decode and backend != "python":
            media = ", ".join(sorted(set(tail.decode.values())))
            raise CutError(
                f"'{tail.name}' takes {media}, which Triton's onnxruntime backend cannot decode; "
                "add --backend python"
            )
    runtime = importlib.resources.files("edgekit_runtime")
    for tail in tails:
        version = folder / tail.name / "1"
        version.mkdir(parents=True, exist_ok=True)
        tail.write(version / "model.onnx")
        _write(folder / tail.name / "config.pbtxt", configuration(tail, backend, accelerator))
        if backend == "python":
            source = importlib.resources.files("edgekit_offload.export") / "triton_model.py"
            _write(version / "model.py", source.read_text())
            for name in _MEDIA_MODULES if tail.decode else ():
                _write(version / "edgekit_runtime" / name, (runtime / name).read_text())
    if backend == "python":
        has_media = any(tail.decode for tail in tails)
        packages = _REQUIREMENTS if not accelerator.is_gpu else _GPU_REQUIREMENTS
        _write(folder / "requirements.txt", packages + (_MEDIA_REQUIREMENTS if has_media else ""))


def configuration(tail: Tail, backend: TritonBackend, accelerator: Accelerator = PROCESSOR) -> str:
    """Return the text of the file `config.pbtxt` for a tail.

    If Triton may batch requests, `dims` do not include the batch. Otherwise `max_batch_size` is 0 and `dims`
    are complete. Free dimensions are -1.
    """
    lines = [
        f"name: {_quoted(tail.name)}",
        f"backend: {_quoted(backend)}",
        f"max_batch_size: {MAX_BATCH if tail.is_batched else 0}",
        *(_tensor("input", spec, tail) for spec in tail.inputs),
        *(_tensor("output", spec, tail) for spec in tail.outputs),
        f"instance_group [{{ kind: KIND_{'GPU' if accelerator.is_gpu else 'CPU'} count: 1 }}]",
    ]
    if accelerator.has_tensorrt:
        lines.append(_TENSORRT)
    if tail.is_batched:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {_QUEUE_DELAY_US} }}")
    if tail.decode:
        value = json.dumps(json.dumps(tail.decode, sort_keys=True))
        lines.append(f'parameters {{ key: "decode" value {{ string_value: {value} }} }}')
    return "\n".join(lines) + "\n"


def _tensor(kind: str, spec: TensorSpec, tail: Tail) -> str:
    is_file = kind == "input" and spec.name in tail.decode
    shape = ["bytes"] if is_file else spec.shape[1:] if tail.is_batched else spec.shape
    dims = ", ".join(str(size if isinstance(size, int) else -1) for size in shape)
    datatype = "UINT8" if is_file else DATATYPE_OF_DTYPE[spec.dtype]
    return f"{kind} [{{ name: {_quoted(spec.name)} data_type: TYPE_{datatype} dims: [{dims}] }}]"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomically(path, text)
