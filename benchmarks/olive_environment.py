"""Makes the environment in which Olive runs: benchmarks/.envs/olive, once.

It is apart from the project's because Olive brings torch (several GB with its GPU libraries) and needs an
older pydantic.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import onnxruntime

FOLDER = Path(__file__).resolve().parent / ".envs" / "olive"
PACKAGES = (
    "olive-ai==0.13.*",
    "pydantic<2.12",  # Olive 0.13 fails to import with newer ones
    "requests",  # Olive imports it without declaring it
    f"onnxruntime=={onnxruntime.__version__}",  # the quantizer that Olive calls: the same for both
)


def olive_python() -> Path | None:
    """The interpreter of Olive's environment, made on first use; None where pip cannot make it."""
    python, stamp = FOLDER / "bin" / "python", FOLDER / "packages.txt"
    wanted = "\n".join(PACKAGES)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {FOLDER} (about 6 GB)", file=sys.stderr)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    pip = (
        [uv, "pip", "install", "--quiet", "--python", str(python)]
        if uv
        else [str(python), "-m", "pip", "install"]
    )
    for command in ([sys.executable, "-m", "venv", "--clear", str(FOLDER)], [*pip, *PACKAGES]):
        if subprocess.run(command, check=False).returncode:
            return None
    stamp.write_text(wanted)
    return python
