"""What a file is that is not an ONNX model, in words that say what to do next.

It only looks at bytes: nothing is unpickled, unpacked or loaded.
"""

from pathlib import Path
from typing import Final

TO_ONNX_FROM_TORCH: Final = "export it first: torch.onnx.export(model, example_inputs, 'model.onnx')"
TO_ONNX_FROM_KERAS: Final = "export it first: model.export('model.onnx', format='onnx'), or tf2onnx"

TFLITE: Final = (4, b"TFL3")

# offset, bytes there, what that is and what to do
SIGNATURES: Final = (
    (*TFLITE, "a LiteRT (.tflite) model, not an ONNX model"),
    (4, b"ORTM", "a model in onnxruntime's own format; give the .onnx that it was made from"),
    (0, b"\x89HDF", f"an HDF5 file (Keras .h5); {TO_ONNX_FROM_KERAS}"),
    (0, b"PK\x03\x04", f"a ZIP archive (PyTorch .pt and .pth are); {TO_ONNX_FROM_TORCH}"),
    (0, b"\x80\x02", f"a Python pickle (older PyTorch .pth are); {TO_ONNX_FROM_TORCH}"),
    (0, b"\x80\x04", f"a Python pickle; {TO_ONNX_FROM_TORCH}"),
    (0, b"GGUF", "a GGUF file of language model weights; it has no graph that could be imported"),
    (8, b'{"', "a safetensors file: weights without a graph; export the model they belong to as ONNX"),
    (0, b"version https://git-lfs", "a Git LFS pointer in the place of the model; run `git lfs pull`"),
    (0, b"\x1f\x8b", "gzip-compressed; unpack it first"),
)

# The fields of ModelProto: number -> wire type (0 varint, 2 with a length). Source: onnx.proto.
MODEL_FIELDS: Final = {1: 0, 2: 2, 3: 2, 4: 2, 5: 0, 6: 2, 7: 2, 8: 2, 14: 2, 20: 2, 25: 2, 26: 2}
GREATEST_PLAUSIBLE_IR: Final = 99


def is_tflite(path: Path) -> bool:
    """Whether a file is a `.tflite` model by its signature."""
    offset, signature = TFLITE
    try:
        with path.open("rb") as file:
            return file.read(offset + len(signature))[offset:] == signature
    except OSError:
        return False


def describe_folder(path: Path) -> str:
    """Return what a folder in the place of a model is."""
    if (path / "saved_model.pb").exists():
        return "a TensorFlow SavedModel; export it first: python -m tf2onnx.convert --saved-model"
    return "a folder; give the model file in it"


def describe(path: Path, content: bytes) -> str:
    """Return what `content`, which is not an ONNX model, is."""
    if not content:
        return "empty; write or copy the file again"
    if path.name == "saved_model.pb":
        return describe_folder(path.parent)
    if path.suffix == ".keras":
        return f"a Keras model; {TO_ONNX_FROM_KERAS}"
    for offset, signature, words in SIGNATURES:
        if content.startswith(signature, offset):
            return words
    missing = missing_end(content)
    if missing:
        return f"truncated: {missing}; copy or export the file again"
    if _is_text(content[:256]):
        return f"text that begins with {content[:40].decode('utf-8', 'replace')!r}; give an .onnx file"
    return "not an ONNX model, or damaged; give an .onnx file, or copy it again"


def is_onnx_head(head: bytes) -> bool:
    """Whether bytes may begin an ONNX model: the version of its format, then another field of a model."""
    tag, at = _varint(head, 0)
    version, at = _varint(head, at)
    following, _ = _varint(head, at)
    return (
        tag == 1 << 3
        and 1 <= version <= GREATEST_PLAUSIBLE_IR
        and MODEL_FIELDS.get(following >> 3) == following & 7
        and at < len(head)
    )


def missing_end(content: bytes) -> str:
    """Return how much is missing where `content` is the beginning of an ONNX model, otherwise nothing."""
    at, first = 0, True
    while at < len(content):
        tag, at = _varint(content, at)
        field, wire = tag >> 3, tag & 7
        if MODEL_FIELDS.get(field) != wire or (first and field != 1):
            return ""
        value, at = _varint(content, at)
        if first and not 1 <= value <= GREATEST_PLAUSIBLE_IR:
            return ""
        first = False
        if wire == 2 and value > len(content) - at:
            return f"a part of {value} bytes begins at byte {at}, and {len(content) - at} bytes follow"
        at += value if wire == 2 else 0
    return ""


def _varint(content: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at `at`, and where it ends."""
    value = 0
    for place, byte in enumerate(content[at : at + 10]):
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at + place + 1
    return value, len(content)


def _is_text(head: bytes) -> bool:
    return all(byte >= 0x20 or byte in b"\t\r\n" for byte in head) and head.isascii()
