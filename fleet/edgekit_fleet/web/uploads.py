"""Receives uploaded packages into files, with limits on size and time."""

import re
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from edgekit_fleet.web.multipart import MultipartParser, PartBegin
from edgekit_fleet.web.request_body import discard_body, read_pieces
from edgekit_runtime.errors import OutputError, RequestError

MAX_PACKAGE_BYTES: Final = 2 << 30
PIECE_S: Final = 30.0
_MAX_FIELDS_BYTES: Final = 64 << 10
_LIFE_S: Final = 86_400.0
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


@dataclass(frozen=True, slots=True)
class UploadedForm:
    """A form with files.

    Attributes:
        fields: The values of the fields by name.
        folder: The folder of the files, which is deleted after the request.
        files: The paths of the uploaded files, whose names come from `clean_name`.
    """

    fields: Mapping[str, str]
    folder: Path
    files: Sequence[Path]


@asynccontextmanager
async def receive_form(
    request: Request, folder: Path, admit: Callable[[Mapping[str, str]], None]
) -> AsyncIterator[UploadedForm]:
    """Yield a form whose files exist until the block ends.

    Args:
        request: A request with `multipart/form-data` of at most `MAX_PACKAGE_BYTES`.
        folder: The folder for temporary files.
        admit: A function that is called with the fields before the first file. It raises an error to refuse
            the form.

    Raises:
        RequestError: 400 if the form is malformed or incomplete, 408 if it is too slow, 413 if it is too
            large, or 415 if it has another type.
        OutputError: The disk is full.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        await run_in_threadpool(remove_old_uploads, folder)
        folder_path = Path(tempfile.mkdtemp(dir=folder, prefix=".form-"))
    except OSError as cause:
        raise OutputError(f"cannot keep the upload: {cause.strerror}") from cause
    try:
        writer = _FormWriter(folder_path, admit)
        try:
            await writer.take(request)
        except RequestError:
            await discard_body(request)
            raise
        except OSError as cause:
            raise OutputError(f"cannot keep the upload: {cause.strerror}") from cause
        finally:
            writer.close()
        yield UploadedForm(writer.read_fields(), folder_path, writer.files)
    finally:
        await run_in_threadpool(shutil.rmtree, folder_path, ignore_errors=True)


class _FormWriter:
    """Writes the files of a form to a folder, and stores its fields."""

    def __init__(self, folder: Path, admit: Callable[[Mapping[str, str]], None]) -> None:
        self.files: list[Path] = []
        self._folder = folder
        self._admit = admit
        self._fields: dict[str, bytes] = {}
        self._field = ""
        self._file: IO[bytes] | None = None
        self._is_admitted = False

    async def take(self, request: Request) -> None:
        parser = MultipartParser(request.headers.get("content-type", ""))
        async for piece in read_pieces(request, MAX_PACKAGE_BYTES, PIECE_S):
            for part in parser.feed(piece):
                if isinstance(part, PartBegin):
                    self._begin(part)
                elif self._file is not None:
                    await run_in_threadpool(self._file.write, part)
                else:
                    self._add_to_field(part)
        if not parser.is_complete:
            raise RequestError(400, "the form was cut off")
        if not self._is_admitted:
            self._admit(self.read_fields())

    def read_fields(self) -> dict[str, str]:
        """Return the fields received so far.

        Raises:
            RequestError: A field is not text.
        """
        try:
            return {name: value.decode() for name, value in self._fields.items()}
        except UnicodeDecodeError as cause:
            raise RequestError(400, "a field of the form is no UTF-8") from cause

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, part: PartBegin) -> None:
        self.close()
        if part.file_name is None:
            if part.name in self._fields:
                raise RequestError(400, f"field '{part.name}' stands twice in the form")
            self._field = part.name
            self._add_to_field(b"")
            return
        if not self._is_admitted:
            self._admit(self.read_fields())
            self._is_admitted = True
        if not part.file_name:  # a browser sends this if nothing was chosen
            self._field = part.name
            self._add_to_field(b"")
            return
        path = self._folder / clean_name(part.file_name)
        while path.exists():
            path = self._folder / f"{len(self.files) + 1}-{path.name}"
        self._file = path.open("xb")
        self.files.append(path)

    def _add_to_field(self, data: bytes) -> None:
        self._fields[self._field] = self._fields.get(self._field, b"") + data
        if sum(map(len, self._fields.values())) > _MAX_FIELDS_BYTES:
            raise RequestError(413, f"the fields of the form have over {_MAX_FIELDS_BYTES} bytes")


def clean_name(stated: str) -> str:
    """Return a safe file name that is as similar as possible to the name from the client."""
    name = _UNSAFE.sub("_", re.split(r"[/\\]", stated)[-1]).lstrip("._-")[-100:]
    return name or "package"


def remove_old_uploads(folder: Path) -> None:
    """Delete uploads that are over a day old, such as unreleased packages and files of killed processes."""
    for path in folder.iterdir():
        try:
            if path.stat().st_mtime >= time.time() - _LIFE_S:
                continue
        except FileNotFoundError:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
