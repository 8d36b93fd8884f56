"""An onnxruntime that aborts on some models, for other processes: that of this machine, with a trap."""

from pathlib import Path
from typing import Final

_SOURCE: Final = """
import os, sys
from pathlib import Path
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
del sys.modules["onnxruntime"]
import onnxruntime as real
sys.modules["onnxruntime"] = real
created = real.InferenceSession
def create(model, *options, **more):
    content = model if isinstance(model, bytes) else Path(model).read_bytes()
    if any(name in content for name in {names!r}):
        print("vector::operator[]: out of range", file=sys.stderr)
        os.abort()
    return created(model, *options, **more)
real.InferenceSession = create
"""


def write_aborting_onnxruntime(folder: Path, *aborts_on: bytes) -> None:
    """Write the module into `folder`; it aborts on a model that holds one of the texts."""
    (folder / "onnxruntime").mkdir(parents=True)
    (folder / "onnxruntime" / "__init__.py").write_text(_SOURCE.format(names=aborts_on))
