"""The command that installs an optional part into the running Python, for messages."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def python_here() -> str:
    """Return what to call the Python that runs this: `.venv/bin/python` in a checkout that `./edgekit` runs.

    Another virtual environment is named by its path below the working folder (`env/bin/python`), if any.
    It names no folder of this machine, since messages end up in reports.
    """
    prefix = Path(sys.prefix)
    if prefix.resolve() == (_ROOT / ".venv").resolve():
        return ".venv/bin/python"
    try:
        below = prefix.relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere, or the working folder was removed
        return "python"
    return "python" if sys.prefix == sys.base_prefix else str(below / "bin" / "python")


def install_command(extra: str) -> str:
    """Return how to install an extra of `edgekit` into the Python that runs this."""
    if (_ROOT / "requirements" / "host.txt").is_file():  # a checkout, of which no index has the version
        return f"{python_here()} -m pip install -e '.[{extra}]' (in the checkout)"
    return f"{python_here()} -m pip install 'edgekit[{extra}]'"
