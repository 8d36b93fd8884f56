"""An onnxruntime that aborts on some models, for other processes: that of this machine, with a trap."""

from pathlib import Path
from typing import Final

_SOURCE: Final = """
import hashlib, os, sys
from pathlib import Path
first = Path(__file__).with_name("first.sha256")
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
del sys.modules["onnxruntime"]
import onnxruntime as real
sys.modules["onnxruntime"] = real
created = real.InferenceSession
def create(model, *options, **more):
    content = model if isinstance(model, bytes) else Path(model).read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    if {first!r} and {first!r} in content and not first.exists():
        first.write_text(digest)
    is_first = first.exists() and first.read_text() == digest
    if is_first or any(name in content for name in {names!r}):
        print("vector::operator[]: out of range", file=sys.stderr)
        os.abort()
    return created(model, *options, **more)
real.InferenceSession = create
"""


def write_aborting_onnxruntime(folder: Path, *aborts_on: bytes, first: bytes = b"") -> None:
    """Write the module into `folder`; it aborts on a model that holds one of the texts.

    It also aborts on the first model that holds `first`, as often as that is opened.
    """
    (folder / "onnxruntime").mkdir(parents=True)
    (folder / "onnxruntime" / "__init__.py").write_text(_SOURCE.format(names=aborts_on, first=first))
