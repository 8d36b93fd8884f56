"""Writes samples of a model into a folder for `edgekit package --calibration --eval`.

field/<ID>.jpg      The input as it was received. Tensors, which have no media type, are .npz files.
field/labels.csv    file_name, label and suggestion of each sample. People fill in `label`. Tensors are not
                    listed.
field/selection.csv file_name, probability, triggers, device, version and taken_at of each sample.

`probability` is the probability with which the request was selected as a sample.
"""

import base64
import csv
import io
import zipfile  # noqa: TID251 - an .npz is data for the user, not a package
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.lib import format as npy_format

from edgekit_fleet.api.client import FleetCaller, list_all
from edgekit_fleet.api.endpoints.endpoint import Named
from edgekit_fleet.api.endpoints.samples import ListSamples, OpenedSample, get_sample, list_samples
from edgekit_fleet.operations.samples import SampleSummary
from edgekit_runtime.errors import DataError, OutputError, RequestError
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.wav import write_wav
from edgekit_runtime.protocol.samples import SAMPLE_ID
from edgekit_runtime.system.atomic_files import make_folders, write_atomically
from edgekit_runtime.tensors import DTYPES

LABELS: Final = "labels.csv"
SELECTION: Final = "selection.csv"
_SUFFIXES: Final = {
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/bmp": ".bmp",
    "audio/wav": ".wav",
    "audio/x-wav": ".wav",
    "audio/wave": ".wav",
    "audio/vnd.wave": ".wav",
    "video/x-raw": ".png",
    "audio/x-raw": ".wav",
}
_BY_APPLICATION: Final = ("kept",)
_MAX_PIXELS: Final = 89_000_000
_MAX_LABEL: Final = 128
_FORMULA: Final = ("=", "+", "-", "@")  # a spreadsheet takes a cell that begins so for a formula


def write_field_folder(fleet: FleetCaller, folder: Path, **choice: str) -> tuple[int, list[str]]:
    """Fetch the samples that are not in the folder yet. Labels in the folder are kept.

    The folder is created if it is missing. `choice` has the fields of a `ListSamples` request that selects
    the samples.

    Returns:
        The number of new files, and a message for each sample that cannot be read.

    Raises:
        OutputError: The folder cannot be written.
        EdgekitError: See `FleetCaller.call`.
    """
    count, faults = 0, []
    labels, selection = _read_rows(folder / LABELS), _read_rows(folder / SELECTION)
    try:
        make_folders(folder)
        for summary in _leave_out_repeated([*list_all(fleet, list_samples, ListSamples, **choice)]):
            if SAMPLE_ID.fullmatch(summary.id) is None:  # it names files here
                raise DataError(f"the fleet states a sample {summary.id[:40]!r}")
            name = f"{summary.id}{_find_suffix(summary)}"
            if name in selection and (folder / name).is_file():
                continue
            try:
                sample = fleet.call(get_sample, Named(name=summary.id))
                content = _read_content(sample)
            except (DataError, RequestError, ValueError) as error:  # ValueError: NumPy, of an odd shape
                faults.append(f"{summary.id} of {summary.device}: {error}")
                continue
            with write_atomically(folder / name) as file:
                file.write(content)
            count += 1
            if summary.media_type:  # the packager takes labels of arrays from the arrays
                labels.setdefault(name, {"label": "", "suggestion": _suggest(sample.answer)})
            selection[name] = _describe(summary)
    except OSError as cause:
        raise OutputError(f"cannot write {folder}: {cause}") from cause
    finally:
        if count:
            if labels:
                _write_rows(folder / LABELS, labels)
            _write_rows(folder / SELECTION, selection)
    return count, faults


def _leave_out_repeated(summaries: list[SampleSummary]) -> list[SampleSummary]:
    """Return the samples, without random ones of requests that an application kept as well.

    All kept requests are present and count once. The same request in a random sample would count twice.
    """
    application_samples = {
        (summary.device, summary.taken_at) for summary in summaries if summary.triggers == _BY_APPLICATION
    }
    return [
        summary
        for summary in summaries
        if summary.triggers == _BY_APPLICATION
        or (summary.device, summary.taken_at) not in application_samples
    ]


def _find_suffix(summary: SampleSummary) -> str:
    name = summary.media_type.partition(";")[0].strip().lower()
    return _SUFFIXES.get(name, ".bin") if name else ".npz"


def _read_content(sample: OpenedSample) -> bytes:
    """Return the content of a sample in a file format that `edgekit package` reads.

    Raises:
        DataError: The content does not match the metadata of the sample.
    """
    content = base64.b64decode(sample.content)
    if not sample.summary.media_type:
        return _write_tensors(sample, content)
    media = MediaType.parse(sample.summary.media_type)
    if media.name == "video/x-raw":
        output = io.BytesIO()
        media.read_image(content, _MAX_PIXELS).save(output, "PNG")
        return output.getvalue()
    if media.name == "audio/x-raw":
        return write_wav(*media.read_amplitudes(content))
    return content


def _write_tensors(sample: OpenedSample, content: bytes) -> bytes:
    output, position = io.BytesIO(), 0
    with zipfile.ZipFile(output, "w") as archive:  # not `np.savez`: an input may be named as its parameters
        for tensor in sample.tensors:
            if tensor.dtype not in DTYPES or any(size < 0 for size in tensor.shape):
                raise DataError(f"tensor '{tensor.name}' is {tensor.dtype[:20]} {list(tensor.shape)}")
            dtype = DTYPES[tensor.dtype].newbyteorder("<")
            size_bytes = int(np.prod(tensor.shape, dtype=object)) * dtype.itemsize
            if size_bytes > len(content) - position:
                raise DataError(f"tensor '{tensor.name}' has fewer bytes than its shape says")
            values = np.frombuffer(content, dtype, size_bytes // dtype.itemsize, position)
            with archive.open(f"{tensor.name}.npy", "w") as file:
                npy_format.write_array(file, values.reshape(tensor.shape))
            position += size_bytes
    return output.getvalue()


def _suggest(answer: Mapping[str, Any]) -> str:
    """Return the label of the answer's best entry, or its text, escaped for spreadsheets."""
    label: object = answer.get("text", "")
    for value in answer.values():
        if isinstance(value, list) and value and isinstance(value[0], dict) and "label" in value[0]:
            label = value[0]["label"]
            break
    text = "".join(sign for sign in str(label)[:_MAX_LABEL] if sign.isprintable())
    return f"'{text}" if text.startswith(_FORMULA) else text


def _describe(summary: SampleSummary) -> dict[str, str]:
    return {
        "probability": repr(summary.probability),
        "triggers": " ".join(summary.triggers),
        "device": summary.device,
        "version": summary.version if not summary.version.startswith(_FORMULA) else f"'{summary.version}",
        "taken_at": f"{summary.taken_at:.0f}",
    }


def _read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return a dict from file name to the other columns of a CSV file.

    Raises:
        DataError: The file cannot be read or has no column `file_name`.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        return {row.pop("file_name"): row for row in csv.DictReader(io.StringIO(text))}
    except FileNotFoundError:
        return {}
    except (OSError, KeyError, ValueError, csv.Error) as cause:
        raise DataError(f"{path}: cannot be read as a list with 'file_name': {cause}") from cause


def _write_rows(path: Path, rows: Mapping[str, Mapping[str, str]]) -> None:
    output = io.StringIO()
    fields = list(dict.fromkeys(field for row in rows.values() for field in row))
    writer = csv.DictWriter(output, ["file_name", *fields], lineterminator="\n")
    writer.writeheader()
    writer.writerows({"file_name": name, **row} for name, row in rows.items())
    with write_atomically(path) as file:
        file.write(output.getvalue().encode())
