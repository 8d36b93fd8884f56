"""Finds images or sound recordings and their labels, without decoding them.

Labels are either the names of the subfolders or come from a list in the folder. The list is called
`labels.csv`, `labels.json`, `metadata.csv` or `metadata.jsonl`.
"""

import csv
import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing import audio, images
from edgekit_toolkit.samples.selection import SELECTION

Label = int | str

SUFFIXES: Final[Mapping[str, str]] = {
    **dict.fromkeys(images.SUFFIXES, "image"),
    **dict.fromkeys(audio.SUFFIXES, "audio"),
}
_LISTS: Final = ("labels.csv", "labels.json", "metadata.csv", "metadata.jsonl")
_LIST_SUFFIXES: Final = frozenset({".csv", ".json", ".jsonl"})
# Of lists that `boxes` reads, and of files that a message explains.
_OTHER_SUFFIXES: Final = frozenset({".yaml", ".yml", ".txt", ".parquet", ".arrow"})
_ARRAYS: Final = frozenset({".npz", ".npy"})


@dataclass(frozen=True, slots=True)
class Event:
    """A sound event in a recording: its start and end in seconds, and its class."""

    begin_s: float
    end_s: float
    label: str


@dataclass(frozen=True, slots=True)
class MediaFiles:
    """Image or sound files under a path, with their labels.

    Attributes:
        kind: `image` or `audio`.
        labels: The class name, class number or text of each file, or None without labels.
        notes: Sentences for the user, such as how many files are ignored.
        has_texts: Whether the labels are texts instead of classes.
        events: The sound events of each file, or None if the list of labels contains no times.
    """

    kind: str
    files: tuple[Path, ...]
    labels: tuple[Label, ...] | None
    notes: tuple[str, ...]
    has_texts: bool = False
    events: tuple[tuple[Event, ...], ...] | None = None

    @property
    def class_names(self) -> set[str]:
        """The class names in labels and events. Numeric labels are left out."""
        names = {event.label for events in self.events or () for event in events}
        return names | {label for label in self.labels or () if isinstance(label, str)}


def is_media(path: Path) -> bool:
    """Return whether `find_media` can read a path.

    The path must be a file of a supported type, a list of labels, or a folder without arrays.
    """
    if path.is_dir():
        entries = list(path.iterdir())
        has_arrays = any(entry.suffix in _ARRAYS for entry in entries)
        return not has_arrays and any(_is_visible(entry.name) for entry in entries)
    return path.is_file() and path.suffix.lower() in {*SUFFIXES, *_LIST_SUFFIXES, *_OTHER_SUFFIXES}


def are_recordings(names: Sequence[str]) -> bool:
    return bool(names) and all(SUFFIXES.get(Path(name).suffix.lower()) == "audio" for name in names)


def find_media(path: Path, *, labelled: bool = True, texts: bool = False) -> MediaFiles:
    """Return the image or sound files under `path` with their labels, sorted by name.

    Files that are missing in a list of labels are left out. A note states their number.

    Args:
        path: A file, a list or a folder.
        labelled: Whether to read labels from lists or from the names of subfolders.
        texts: Whether to read labels from the column `text` of a list if it exists.

    Raises:
        DataError: There are no files, there are both images and recordings, or a list of labels is malformed.
    """
    if path.is_file() and path.suffix.lower() in SUFFIXES:
        return MediaFiles(SUFFIXES[path.suffix.lower()], (path,), None, ())
    lists = [path] if path.is_file() else [path / name for name in _LISTS if (path / name).is_file()]
    if len(lists) > 1:
        raise DataError(f"{path}: holds {' and '.join(path.name for path in lists)}; keep one list of labels")
    files, others = list_media(path if path.is_dir() else path.parent)
    others -= Counter(path.suffix for path in lists)
    others -= Counter({".csv": int((path if path.is_dir() else path.parent).joinpath(SELECTION).is_file())})
    kinds = {SUFFIXES[file.suffix.lower()] for file in files}
    if len(kinds) != 1:
        raise DataError(f"{path}: {_no_media(others) if not kinds else 'holds images as well as recordings'}")
    notes = []
    if others:
        text = ", ".join(f"{count} of {suffix or 'no suffix'}" for suffix, count in sorted(others.items()))
        notes.append(f"files that are neither JPEG, PNG, BMP, WebP nor WAV are left out: {text}")
    labels: dict[Path, Label] | None = None
    has_texts = False
    if labelled and lists:
        rows = list(_rows(lists[0]))
        if any("begin_s" in row for row in rows):
            events = _list_events(lists[0], rows, {_key(file): file for file in files})
            return MediaFiles("audio", tuple(events), None, tuple(notes), events=tuple(events.values()))
        has_texts = texts and any("text" in row for row in rows)
        if has_texts:
            rows = [row | {"label": row.get("text")} for row in rows]
        labels = _listed(lists[0], rows, {_key(file): file for file in files}, are_texts=has_texts)
        if labels and len(labels) < len(files):
            unlabelled = sum(row.get("label") == "" for row in rows)
            reasons = {
                "does not list them": len(files) - len(labels) - unlabelled,
                "has no label for them": unlabelled,
            }
            notes += [
                f"{count} files are left out: {lists[0].name} {reason}"
                for reason, count in reasons.items()
                if count > 0
            ]
    elif labelled:
        labels = _by_folder(path, files)
    if not labels:
        return MediaFiles(kinds.pop(), tuple(files), None, tuple(notes))
    return MediaFiles(kinds.pop(), tuple(labels), tuple(labels.values()), tuple(notes), has_texts)


def list_media(root: Path) -> tuple[list[Path], "Counter[str]"]:
    """Return the visible media files under a folder, sorted, and the number of other files by suffix.

    Raises:
        DataError: A folder cannot be read, or a path with a media suffix is not a regular file.
    """
    files: list[Path] = []
    others: Counter[str] = Counter()
    above: dict[str, frozenset[tuple[int, int]]] = {}
    for folder, inner, names in os.walk(root, followlinks=True, onerror=_refuse):
        status = Path(folder).stat()
        identity, parents = (status.st_dev, status.st_ino), above.get(str(Path(folder).parent), frozenset())
        if identity in parents:  # a link to a folder above
            inner.clear()
            continue
        above[folder] = parents | {identity}
        inner[:] = sorted(filter(_is_visible, inner))
        for name in sorted(filter(_is_visible, names)):
            if Path(name).suffix.lower() in SUFFIXES:
                files.append(_regular(Path(folder, name)))
            else:
                others[Path(name).suffix.lower()] += 1
    return files, others


def _regular(file: Path) -> Path:
    if file.exists() and not file.is_file():  # a pipe: opening it would wait for a writer
        raise DataError(f"{file}: is no regular file; remove it, or save what it gives")
    return file


def _refuse(error: OSError) -> None:
    raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from error


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "Thumbs.db"


def _no_media(others: "Counter[str]") -> str:
    hint = ""
    if others.keys() & {".parquet", ".arrow"}:
        hint = (
            "; parquet and arrow are not read, save the images as files:"
            " for i, row in enumerate(data): row['image'].save(f'photos/{row[\"label\"]}/{i}.png')"
        )
    return f"the folder holds no .npz or .npy file, no image (JPEG, PNG, BMP, WebP) and no WAV file{hint}"


def _by_folder(root: Path, files: Sequence[Path]) -> dict[Path, Label] | None:
    """Return the name of each file's sub-folder of `root`; None if files lie in `root` itself."""
    parts = {file: file.relative_to(root).parts for file in files}
    flat = [file for file, names in parts.items() if len(names) == 1]
    if flat and len(flat) < len(files):
        raise DataError(
            f"{root}: holds {flat[0].name} beside class folders; move it into one, or all files into one"
            " folder if they have no labels"
        )
    return None if flat else {file: names[0] for file, names in parts.items()}


def _key(path: Path) -> str:
    return os.path.normpath(path)


def _listed(
    path: Path, rows: Sequence[Mapping[str, Any]], files: Mapping[str, Path], *, are_texts: bool
) -> dict[Path, Label] | None:
    """Return the label of each file that a list names; None for a list without labels."""
    if path.stem == "metadata" and all("label" not in row for row in rows):
        return None
    labels: dict[Path, Label] = {}
    for number, row in enumerate(rows, 1):
        name, label = row.get("file_name"), row.get("label")
        if label == "" and not are_texts:  # a person has not labelled it yet
            continue
        if not isinstance(name, str) or isinstance(label, bool) or not isinstance(label, (int, str)):
            raise DataError(
                f"{path}: entry {number} is {json.dumps(row)[:100]}, expected 'file_name' (below the list's"
                " folder) and 'label' (a class name or number)"
            )
        file = files.get(_key(path.parent / name))
        if file is None:
            raise DataError(f"{path}: entry {number} names '{name}', and there is no such image or recording")
        is_number = isinstance(label, str) and label.isdecimal() and not are_texts
        labels[file] = int(label) if is_number else label
    if len({type(label) for label in labels.values()}) > 1:
        raise DataError(f"{path}: some labels are numbers and some are names; use one of both")
    if not labels and not rows:
        raise DataError(f"{path}: lists no file")
    return labels or None


def _list_events(
    path: Path, rows: Sequence[Mapping[str, Any]], files: Mapping[str, Path]
) -> dict[Path, tuple[Event, ...]]:
    """Return the events of each file that a list names; a row without times names a file without events."""
    events: dict[Path, tuple[Event, ...]] = {}
    for number, row in enumerate(rows, 1):
        file = files.get(_key(path.parent / str(row.get("file_name"))))
        if file is None:
            raise DataError(
                f"{path}: entry {number} names '{row.get('file_name')}', which is no recording here"
            )
        events.setdefault(file, ())
        if row.get("begin_s") in ("", None):
            continue
        try:
            begin_s, end_s = float(row["begin_s"]), float(row["end_s"])
        except (KeyError, TypeError, ValueError):
            begin_s = end_s = math.nan
        if not 0 <= begin_s < end_s < math.inf or not row.get("label"):
            raise DataError(
                f"{path}: entry {number} is {json.dumps(row)[:100]}, expected 'file_name', 'begin_s' and"
                " 'end_s' in seconds, and 'label', the name of a class"
            )
        events[file] += (Event(begin_s, end_s, str(row["label"])),)
    return events


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
        if path.suffix.lower() == ".csv":
            return [dict(row) for row in csv.DictReader(text.splitlines())]
        if path.suffix.lower() == ".jsonl":
            entries: Any = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            entries = json.loads(text)
    except (OSError, ValueError, csv.Error, RecursionError) as error:
        raise DataError(f"{path}: cannot be read as a list of labels: {error}") from error
    if isinstance(entries, dict):
        return [{"file_name": name, "label": label} for name, label in entries.items()]
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'{path}: expected {{"a.jpg": "cat", ...}} or a list of objects')
    return entries
