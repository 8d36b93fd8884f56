"""Programs that run on the device, with only the runtime and its dependencies."""

from pathlib import Path
from typing import Final

_FOLDER: Final = Path(__file__).parent


def read_program(name: str) -> str:
    """Return the source of a program of this folder."""
    return (_FOLDER / f"{name}.py").read_text(encoding="utf-8")
