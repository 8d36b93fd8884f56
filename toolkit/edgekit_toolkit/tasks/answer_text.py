"""Summarises the answers of tasks in a few words, without masks and vectors."""

from collections.abc import Mapping
from typing import Any, Final

_FIGURES: Final = ("label", "text", "score", "share", "value", "begin_s", "end_s")
_POSITIONS: Final = ("box", "point")


def list_entries(answer: Mapping[str, Any], *, with_places: bool) -> list[str]:
    """Return a text for each entry of an answer, such as a class with its score.

    `with_places` says whether the texts include boxes and points.
    """
    names = _FIGURES + (_POSITIONS if with_places else ())
    entries: list[str] = []
    for key, value in answer.items():
        if not isinstance(value, (list, dict)):
            entries.append(f"{key} {value}")
        elif isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            entries += [" ".join(str(entry[name]) for name in names if name in entry) for entry in value]
        elif isinstance(value, list):
            entries.append(f"{key} of {len(value)} values")
    return entries
