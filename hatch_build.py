"""Cuts docstrings of the runtime's internals in wheels, which saves a device 0.4 MB.

Modules and classes keep the first line, functions nothing. Lines keep their numbers, so tracebacks are those
of the source. What applications call keeps all.
"""

import ast
import tempfile
from pathlib import Path
from typing import Any, Final

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE: Final = Path("device_runtime/edgekit_runtime")
_FOR_APPLICATIONS: Final = (
    "client/",
    "sessions/__init__.py",
    "sessions/session.py",
    "sessions/backends.py",
    "errors.py",
)
_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED: Final = (ast.Module, ast.ClassDef, *_FUNCTIONS)


class DocstringHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts shortened copies into a wheel, in place of the modules."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Write the copies; an editable install needs none."""
        if version == "editable":
            return
        self._folder = tempfile.TemporaryDirectory()
        top = Path(self.root) / _PACKAGE
        for path in sorted(top.rglob("*.py")):
            place = path.relative_to(top).as_posix()
            if not place.startswith(_FOR_APPLICATIONS):
                copy = Path(self._folder.name) / place
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(shorten_docstrings(path.read_text()))
                build_data["force_include"][str(copy)] = f"{_PACKAGE.name}/{place}"

    def finalize(self, version: str, *_: object) -> None:
        """Remove the copies."""
        if version != "editable":
            self._folder.cleanup()


def shorten_docstrings(source: str) -> str:
    """Return a module with the first line of its own docstring and those of classes; functions have none."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
            if isinstance(node, _FUNCTIONS) and len(node.body) > 1:
                begin -= 1
            elif end > begin:
                first = lines[begin - 1].rstrip()
                lines[begin - 1] = first + (' """\n' if first.endswith('"') else '"""\n')
            lines[begin:end] = ["\n"] * (end - begin)
    return "".join(lines)
