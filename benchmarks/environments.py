"""Makes the environments in which other projects run, benchmarks/.envs/NAME, each once."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parent / ".envs"


def make_environment(name: str, packages: Sequence[str], size: str) -> Path | None:
    """The interpreter of an environment with `packages`, made on first use; None where pip cannot make it.

    Args:
        name: of its folder.
        packages: requirements; other ones than last time make it again.
        size: of the environment, for the message.
    """
    folder = ENVIRONMENTS / name
    python, stamp = folder / "bin" / "python", folder / "packages.txt"
    wanted = "\n".join(packages)
    if stamp.is_file() and stamp.read_text() == wanted:
        return python
    print(f"making {folder} (about {size})", file=sys.stderr)
    uv = shutil.which("uv", path=str(Path(sys.executable).parent))
    pip = (
        [uv, "pip", "install", "--quiet", "--python", str(python)]
        if uv
        else [str(python), "-m", "pip", "install"]
    )
    bare = ["--without-pip"] if uv else []
    for command in ([sys.executable, "-m", "venv", "--clear", *bare, str(folder)], [*pip, *packages]):
        if subprocess.run(command, check=False).returncode:
            return None
    stamp.write_text(wanted)
    return python
