"""The order of versions, as far as their text gives one. Pure."""

import re
from typing import Final, TypeAlias

_RUN: Final = re.compile(r"[0-9]+|[A-Za-z]+", re.ASCII)

SortKey: TypeAlias = "tuple[tuple[tuple[int, int, str], ...], bool, tuple[tuple[int, int, str], ...]]"
_NUMBER, _WORD = 0, 1


def sort_key(version: str) -> SortKey:
    """Return a key that sorts versions from old to new.

    Runs of digits count as numbers (`1.10` after `1.9`, `rc10` after `rc9`); numbers come before words. A
    suffix after `-` makes a version older (`2.0-rc1` before `2.0`). A leading `v`, zeros at the end (`1.0` is
    `1`) and what follows a `+` do not count.

    Source: Semantic Versioning 2.0.0, section 11, extended to any number of parts.
    """
    release, _, suffix = version.partition("+")[0].partition("-")
    if release[:1] in ("v", "V") and release[1:2].isdigit():
        release = release[1:]
    parts = list(_parts(release))
    while parts and parts[-1] == (_NUMBER, 0, ""):
        parts.pop()
    return tuple(parts), not suffix, _parts(suffix)


def is_older(version: str, other: str) -> bool:
    """Return whether `version` is older than `other`; `1.0+a` and `1.0+b` are equally old."""
    return sort_key(version) < sort_key(other)


def _parts(text: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((_NUMBER, int(run), "") if run.isdigit() else (_WORD, 0, run) for run in _RUN.findall(text))
