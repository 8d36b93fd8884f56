"""Sorts version strings, such as `1.9` and `1.10`."""

import re
from typing import Final, TypeAlias

_RUN: Final = re.compile(r"[0-9]+|[A-Za-z]+", re.ASCII)

SortKey: TypeAlias = "tuple[tuple[tuple[int, int, str], ...], bool, tuple[tuple[int, int, str], ...]]"
_NUMBER, _WORD = 0, 1


def sort_key(version: str) -> SortKey:
    """Return a key that sorts versions from old to new.

    Groups of digits are compared as numbers, so `1.10` comes after `1.9`, and `rc10` after `rc9`. Numbers
    come before words. A suffix after `-` makes a version older, so `2.0-rc1` comes before `2.0`. A leading
    `v`, trailing zeros (`1.0` equals `1`) and everything after a `+` are ignored.

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
    """Return whether `version` is older than `other`. For example, `1.0+a` is not older than `1.0+b`."""
    return sort_key(version) < sort_key(other)


def _parts(text: str) -> tuple[tuple[int, int, str], ...]:
    return tuple((_NUMBER, int(run), "") if run.isdigit() else (_WORD, 0, run) for run in _RUN.findall(text))
