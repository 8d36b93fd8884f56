"""Member names: which paths are allowed in a package.

Only a few characters are allowed, so that a name means the same file on every file system, in every locale
and in every ZIP tool. The runtime itself never unpacks a package, but other tools do.
"""

import re
from collections.abc import Iterable
from typing import Final

MAX_NAME_BYTES: Final = 255

_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", re.ASCII)
# Device names that Windows opens in every folder and with every extension.
_WINDOWS_DEVICES: Final = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789")]
)


def find_name_problem(name: str) -> str | None:
    """Return why `name` is not allowed in a package, for example "is 300 characters long", or None."""
    if not name or len(name) > MAX_NAME_BYTES:
        return f"is {len(name)} characters long, expected 1 to {MAX_NAME_BYTES}"
    for part in name.split("/"):
        if not _PART.fullmatch(part) or part.endswith("."):
            return (
                f"has the part {part!r}, expected letters, digits and '_.+-', not starting with '.', '+' or"
                " '-', not ending with '.' (no '..', no absolute path, no backslash, no drive)"
            )
        if part.split(".")[0].lower() in _WINDOWS_DEVICES:
            return f"has the part {part!r}, which is a device on Windows"
    return None


def find_names_problem(names: Iterable[str]) -> str | None:
    """Return why `names` are not allowed together in one package, or None.

    A problem is a name that `find_name_problem` rejects, a duplicate, two names that differ only in case, or
    a name that is also the folder of another.
    """
    spellings: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for name in names:
        if problem := find_name_problem(name):
            return f"name {name!r} {problem}"
        if name in files:
            return f"name {name!r} stands twice"
        files.add(name)
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if depth < len(parts):
                folders.add(path)
            if (other := spellings.setdefault(path.lower(), path)) != path:
                return f"names {other!r} and {path!r} differ only in case"
    if both := files & folders:
        return f"name {min(both)!r} is a file and a folder"
    return None
