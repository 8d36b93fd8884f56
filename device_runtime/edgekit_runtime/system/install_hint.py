"""The command that installs an optional dependency into the running Python, for messages."""

import sys
from pathlib import Path

_ROOT = Path(__file__).parents[3]


def python_here() -> str:
    """Return a name of the running Python that can be used in a command.

    This is `.venv/bin/python` in a checkout of edgekit, the relative path of an environment below the working
    folder, or `python`. Absolute paths are avoided, because messages are included in reports.
    """
    prefix = Path(sys.prefix)
    if prefix.resolve() == (_ROOT / ".venv").resolve():
        return ".venv/bin/python"
    try:
        below = prefix.relative_to(Path.cwd())
    except (ValueError, OSError):  # elsewhere, or the working folder was removed
        return "python"
    return "python" if sys.prefix == sys.base_prefix else str(below / "bin" / "python")


def install_command(extra: str, root: Path = _ROOT) -> str:
    """Return the command that installs an extra of `edgekit` into the running Python.

    `root` is the parent folder of the package, which may be a checkout.
    """
    if (root / "requirements" / "host.txt").is_file():  # a checkout, whose version no index has
        return f"{python_here()} -m pip install -e '.[{extra}]' (in the checkout)"
    return f"{python_here()} -m pip install 'edgekit[{extra}]'"
