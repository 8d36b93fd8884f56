"""Error messages for files of the wrong kind, which state the kind and what to do next.

This module only reads bytes. It does not unpickle, unpack or load anything.
"""

import re
from pathlib import Path
from typing import Final

from edgekit_runtime.package.model_encodings import DAMAGED, read_varint

_TO_ONNX_FROM_TORCH: Final = "export it first: torch.onnx.export(model, example_inputs, 'model.onnx')"
_TO_ONNX_FROM_KERAS: Final = "`edgekit package … --python ENV/bin/python` exports it with your TensorFlow"
_TO_PACKAGE: Final = "`edgekit package FILE --target TARGET` makes a package of it"
_TO_SAMPLES: Final = "it serves as samples: --calibration, --eval, or `edgekit run PACKAGE --input FILE`"

_HEAD_BYTES: Final = 4096
_PACKAGE: Final = b"manifest.json"  # the first member of the archive
_TFLITE: Final = (4, b"TFL3")

# offset, bytes there, what the file is and what to do
_SIGNATURES: Final = (
    (*_TFLITE, "a LiteRT (.tflite) model, not an ONNX model"),
    (4, b"ORTM", "a model in onnxruntime's own format; give the .onnx that it was made from"),
    (0, b"\x89HDF", f"an HDF5 file (Keras .h5); {_TO_ONNX_FROM_KERAS}"),
    (0, b"PK\x03\x04", f"a ZIP archive (PyTorch .pt and .pth are); {_TO_ONNX_FROM_TORCH}"),
    (0, b"\x80\x02", f"a Python pickle (older PyTorch .pth are); {_TO_ONNX_FROM_TORCH}"),
    (0, b"\x80\x04", f"a Python pickle; {_TO_ONNX_FROM_TORCH}"),
    (0, b"GGUF", "a GGUF file of language model weights; it has no graph that could be imported"),
    (8, b'{"', "a safetensors file: weights without a graph; export the model they belong to as ONNX"),
    (0, b"version https://git-lfs", "a Git LFS pointer instead of the model; run `git lfs pull`"),
    (0, b"\x1f\x8b", "gzip-compressed; unpack it first"),
    (0, b"\xff\xd8\xff", f"a JPEG image; {_TO_SAMPLES}"),
    (0, b"\x89PNG\r\n", f"a PNG image; {_TO_SAMPLES}"),
    (8, b"WAVE", f"a WAV recording; {_TO_SAMPLES}"),
    (8, b"WEBP", f"a WebP image; {_TO_SAMPLES}"),
    (0, b"\x93NUMPY", f"a NumPy array (.npy); {_TO_SAMPLES}"),
    (0, b"-----BEGIN PUBLIC KEY", "a public key; `edgekit keys trust FILE NAME` trusts it"),
    (0, b"-----BEGIN", "a key or certificate; `edgekit keys` handles keys"),
    (0, b"\x7fELF", "a program or library (ELF)"),
    (0, b"%PDF", "a PDF document"),
)

# words in a text file, what it is and what to do
_TEXTS: Final = (
    (rb"edgekit\.dev/recipe/", "a recipe; `edgekit package MODEL --recipe FILE` repeats its package"),
    (rb"edgekit\.dev/report/", "a report as JSON; the package lies beside it"),
    (rb'"payloadType"', "signed evidence; inspect the package beside it, which shows it"),
    (rb"(?i)<!doctype html|<html", "an HTML page, such as a report: open it in a browser"),
)

# A dict from field numbers of ModelProto to wire types (0 varint, 2 with a length). Source: onnx.proto.
_MODEL_FIELDS: Final = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
_GREATEST_PLAUSIBLE_IR: Final = 99


def is_tflite(path: Path) -> bool:
    """Return whether a file has the signature of a `.tflite` model. False if it cannot be read."""
    offset, signature = _TFLITE
    try:
        with path.open("rb") as file:
            return file.read(offset + len(signature))[offset:] == signature
    except OSError:
        return False


def describe_folder(path: Path) -> str:
    """Return a text for an error message about a folder: the kind of the folder and what to do."""
    if (path / "saved_model.pb").exists():
        return f"a TensorFlow SavedModel; {_TO_ONNX_FROM_KERAS}"
    return "a folder; give the model file in it"


def describe_signature(head: bytes) -> str | None:
    """Return a text about a file that begins with `head`, or None if the kind of the file is unknown.

    The text states the kind and what to do.
    """
    matches = (words for offset, signature, words in _SIGNATURES if head.startswith(signature, offset))
    return next(matches, None)


def describe_no_model(path: Path, content: bytes) -> str:
    """Return a text for an error message about a file that is not an ONNX model: its kind and what to do."""
    if not content:
        return "empty; write or copy the file again"
    if path.name == "saved_model.pb":
        return describe_folder(path.parent)
    if path.suffix == ".keras":
        return f"a Keras model; {_TO_ONNX_FROM_KERAS}"
    if (words := describe_signature(content)) is not None:
        return words
    if missing := _missing_end(content):
        return f"truncated: {missing}; copy or export the file again"
    if _is_text(content[:256]):
        return f"text that begins with {content[:40].decode('utf-8', 'replace')!r}; give an .onnx file"
    return "not an ONNX model, or damaged; give an .onnx file, or copy it again"


def describe_no_package(path: Path) -> str | None:
    """Return a text about a file or folder that is not a package, or None if it may be a package.

    The text states the kind and what to do.
    """
    if path.is_dir():
        packages = sorted(package.name for package in path.glob("*.edgepkg"))
        return (
            f"a folder; inspect a package in it, such as {packages[0]}" if packages else describe_folder(path)
        )
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if not head:
        return "empty; copy or write the file again"
    if head.startswith(b"PK\x03\x04"):
        return _describe_zip(path, head)
    if (words := describe_signature(head)) is not None:
        return words
    if _is_onnx_head(head):
        return f"an ONNX model; {_TO_PACKAGE}"
    return next((words for pattern, words in _TEXTS if re.search(pattern, head)), None)


def _describe_zip(path: Path, head: bytes) -> str | None:
    """Describe a ZIP archive by the name of its first member."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name == _PACKAGE:
        return None
    if name.endswith(b".npy"):
        return f"an archive of NumPy arrays (.npz); {_TO_SAMPLES}"
    if path.suffix == ".pt2":
        return f"a PyTorch exported program (.pt2); {_TO_PACKAGE}"
    if path.suffix == ".keras":
        return f"a Keras model; {_TO_ONNX_FROM_KERAS}"
    if name.endswith(b"/data.pkl") or path.suffix in (".pt", ".pth"):
        return "a PyTorch file (.pt, .pth); export it: torch.onnx.export(model, example_inputs, 'model.onnx')"
    return "a ZIP archive, but no package: its first member is no manifest.json"


def _is_onnx_head(head: bytes) -> bool:
    """Whether bytes may begin an ONNX model: the version of its format, then another field of a model."""
    try:
        tag, at = read_varint(head, 0)
        version, at = read_varint(head, at)
        following, _ = read_varint(head, at)
    except DAMAGED:
        return False
    return (
        tag == 1 << 3
        and 1 <= version <= _GREATEST_PLAUSIBLE_IR
        and _MODEL_FIELDS.get(following >> 3) == following & 7
    )


def _missing_end(content: bytes) -> str:
    """Return how many bytes are missing if `content` is the beginning of an ONNX model, else nothing."""
    at, first = 0, True
    try:
        while at < len(content):
            tag, at = read_varint(content, at)
            field, wire = tag >> 3, tag & 7
            if _MODEL_FIELDS.get(field) != wire or (first and field != 1):
                return ""
            value, at = read_varint(content, at)
            if first and not 1 <= value <= _GREATEST_PLAUSIBLE_IR:
                return ""
            first = False
            if wire == 2 and value > len(content) - at:
                return f"a part of {value} bytes begins at byte {at}, and {len(content) - at} bytes follow"
            at += value if wire == 2 else 0
    except IndexError:
        return "it ends within the head of a part"
    except ValueError:
        pass
    return ""


def _is_text(head: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in head) and head.isascii()
