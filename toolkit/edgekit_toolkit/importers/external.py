"""External data: weights that an ONNX model stores in other files.

All locations are checked before a file is read, because a model must not name files outside its folder. In
caches such as that of Hugging Face, the model and its data are links to files in another folder. If the model
is such a link, the folder of its target is also allowed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath

import onnx
from onnx import helper

from edgekit_runtime.errors import ModelError
from edgekit_toolkit.onnx_graph.traversal import stored_tensors

FOUR_BIT_TYPES = frozenset({onnx.TensorProto.UINT4, onnx.TensorProto.INT4, onnx.TensorProto.FLOAT4E2M1})


@dataclass(frozen=True, slots=True)
class _Part:
    """The bytes of one tensor in an external file."""

    tensor: onnx.TensorProto
    path: Path
    offset: int
    length: int


def external_files(model: onnx.ModelProto, path: Path) -> dict[str, Path]:
    """Return a sorted dict from location to path for the external files of the model in `path`.

    The files are not read.

    Raises:
        ModelError: A file is missing, or is outside the model's folder. If the model is a symbolic link,
            external files may also be links into the folder of its target.
    """
    locations = {_entries(name, tensor)["location"]: name for name, tensor in _external(model)}
    return {location: _resolved(path, location, locations[location]) for location in sorted(locations)}


def merge_external(model: onnx.ModelProto, files: Mapping[str, Path], max_bytes: int) -> None:
    """Move the external weights into `model`.

    Args:
        model: The model, which is changed in place.
        files: The result of `external_files`.
        max_bytes: The maximum total size of the weights. It can exceed the size of the files, because tensors
            may share bytes.

    Raises:
        ModelError: An offset or length is beyond the file or does not fit its tensor, or the total is too
            large.
    """
    parts = [_part(name, tensor, files) for name, tensor in _external(model)]
    total = sum(part.length for part in parts)
    if total > max_bytes:
        raise ModelError(f"external weights add up to {total} bytes, at most {max_bytes} are allowed")
    for part in parts:
        with part.path.open("rb") as stream:
            stream.seek(part.offset)
            raw = stream.read(part.length)
        if len(raw) != part.length:
            raise ModelError(f"{part.path}: became shorter while it was read; import the model again")
        part.tensor.raw_data = raw
        del part.tensor.external_data[:]
        part.tensor.data_location = onnx.TensorProto.DEFAULT


def _external(model: onnx.ModelProto) -> Sequence[tuple[str, onnx.TensorProto]]:
    return [
        (name, tensor)
        for name, tensor in stored_tensors(model)
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    ]


def _entries(name: str, tensor: onnx.TensorProto) -> Mapping[str, str]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    if not entries.get("location"):
        raise ModelError(f"tensor '{name}' is stored externally, but names no file; export the model again")
    return entries


def _resolved(model: Path, location: str, name: str) -> Path:
    folder = model.parent
    outside = (
        PurePosixPath(location).is_absolute()
        or PureWindowsPath(location).drive != ""
        or ".." in PurePosixPath(location).parts
        or "\\" in location
        or "\0" in location
    )
    refusal = (
        f"tensor '{name}' is stored in {location!r}, which is outside the model's folder {folder}; refused"
        " unread. Put the file beside the model and save the model with that name"
    )
    if outside:
        raise ModelError(refusal)
    try:
        path = (folder / location).resolve(strict=True)
    except (OSError, RuntimeError) as err:  # RuntimeError: a loop of links
        raise ModelError(
            f"tensor '{name}' is stored in {location!r}, and there is no such file in {folder}; copy it there"
        ) from err
    if not any(map(path.is_relative_to, (folder.resolve(), model.resolve().parent))):
        raise ModelError(f"{refusal} (the link leads to {path})")
    if not path.is_file():
        raise ModelError(f"tensor '{name}' is stored in {location!r}, which is not a regular file")
    return path


def _part(name: str, tensor: onnx.TensorProto, files: Mapping[str, Path]) -> _Part:
    entries = _entries(name, tensor)
    path = files[entries["location"]]
    expected = _stored_bytes(name, tensor)
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", expected))
    except ValueError as err:
        raise ModelError(f"tensor '{name}': external offset or length is not a number; export again") from err
    size = path.stat().st_size
    if offset < 0 or length < 0 or offset + length > size:
        raise ModelError(
            f"tensor '{name}': bytes {offset}..{offset + length} of {path.name} are named, which has {size};"
            " the file is truncated or belongs to another model"
        )
    if length != expected:
        raise ModelError(
            f"tensor '{name}' {list(tensor.dims)}: {length} external bytes are named, expected {expected}"
        )
    return _Part(tensor, path, offset, length)


def _stored_bytes(name: str, tensor: onnx.TensorProto) -> int:
    if any(size < 0 for size in tensor.dims):
        raise ModelError(f"tensor '{name}' has a negative size in shape {list(tensor.dims)}")
    count = math.prod(int(size) for size in tensor.dims)
    if tensor.data_type in FOUR_BIT_TYPES:
        return (count + 1) // 2
    try:
        return count * int(helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
    except KeyError as err:
        raise ModelError(f"tensor '{name}' has the unknown element type {tensor.data_type}") from err
