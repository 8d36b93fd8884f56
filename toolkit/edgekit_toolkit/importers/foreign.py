"""What a file is that is no package, in words that say what edgekit does with it.

Like `sniff`, it only looks at bytes: nothing is unpickled, unpacked or loaded.
"""

import re
from pathlib import Path
from typing import Final

from edgekit_toolkit.importers.sniff import SIGNATURES, describe_folder, is_onnx_head

_HEAD_BYTES: Final = 4096
_PACKAGE: Final = b"manifest.json"  # the first member of the archive
_TO_PACKAGE: Final = "`edgekit package FILE --target TARGET` makes a package of it"
_TO_SAMPLES: Final = "it serves as samples: --calibration, --eval, or `edgekit run PACKAGE --input FILE`"

# offset, bytes there, what that is and what to do
_SIGNATURES: Final = (
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


def describe_foreign(path: Path) -> str | None:
    """Return what a file or folder is and what to do with it; None for what may be a package."""
    if path.is_dir():
        packages = sorted(one.name for one in path.glob("*.edgepkg"))
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
    for offset, signature, words in (*_SIGNATURES, *SIGNATURES):
        if head.startswith(signature, offset):
            return words
    if is_onnx_head(head):
        return f"an ONNX model; {_TO_PACKAGE}"
    return next((words for pattern, words in _TEXTS if re.search(pattern, head)), None)


def _describe_zip(path: Path, head: bytes) -> str | None:
    """Tell ZIP archives apart by the name of their first member."""
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if name == _PACKAGE:
        return None
    if name.endswith(b".npy"):
        return f"an archive of NumPy arrays (.npz); {_TO_SAMPLES}"
    if path.suffix == ".pt2":
        return f"a PyTorch exported program (.pt2); {_TO_PACKAGE}"
    if path.suffix == ".keras":
        return "a Keras model; export it first: model.export('model.onnx', format='onnx')"
    if name.endswith(b"/data.pkl") or path.suffix in (".pt", ".pth"):
        return "a PyTorch file (.pt, .pth); export it: torch.onnx.export(model, example_inputs, 'model.onnx')"
    return "a ZIP archive, but no package: its first member is no manifest.json"
