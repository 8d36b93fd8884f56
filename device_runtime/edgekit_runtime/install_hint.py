"""The command that installs an optional part, for messages."""

import importlib.metadata
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Return how to install an extra of `edgekit` into the Python that runs this.

    In a checkout that is run by `./edgekit`, that is the Python of its `.venv`. The command names no folder
    of this machine, since messages end up in reports; it is to be run in the checkout.
    """
    try:
        importlib.metadata.distribution("edgekit")
    except importlib.metadata.PackageNotFoundError:
        if (_ROOT / "pyproject.toml").is_file():
            return f".venv/bin/python -m pip install -e '.[{extra}]' (in the checkout)"
    return f"python -m pip install 'edgekit[{extra}]'"
