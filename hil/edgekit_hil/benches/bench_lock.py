"""Allows one run at a time on a bench. A broken bench stays locked until a person marks it as repaired."""

import contextlib
import datetime
import fcntl
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edgekit_hil.benches.bench_file import BenchFile
from edgekit_host.evidence import find_hil_folder
from edgekit_runtime.errors import BenchError

_FOLDER: Final = "benches"


@dataclass(frozen=True, slots=True)
class BenchLock:
    """The lock of a bench, in files that all processes share.

    Attributes:
        stem: The path of these files without their suffix.
    """

    name: str
    stem: Path

    @classmethod
    def of(cls, bench: BenchFile) -> "BenchLock":
        """Return the lock of a bench. Bench files for the same device share a lock."""
        slug = re.sub(r"[^A-Za-z0-9_.-]", "_", bench.identity)
        return cls(bench.settings.name, find_hil_folder() / _FOLDER / slug)

    @property
    def broken_file(self) -> Path:
        """The path of the file that says why the bench is broken. It exists only while this is the case."""
        return self.stem.with_name(f"{self.stem.name}.broken")

    def read_reason(self) -> str | None:
        """Return when and why the bench was marked as broken, or None."""
        with contextlib.suppress(FileNotFoundError):
            return self.broken_file.read_text(encoding="utf-8").strip()
        return None

    def mark_broken(self, reason: str) -> None:
        """Mark the bench as broken. If it is already broken, keep the first reason."""
        if self.read_reason() is None:
            self.broken_file.write_text(f"{_now()}: {' '.join(reason.split())}\n", encoding="utf-8")

    def mark_repaired(self) -> str | None:
        """Mark the bench as repaired, and return why it was broken, or None.

        Raises:
            BenchError: A run is using the bench.
        """
        with self._locked():
            reason = self.read_reason()
            self.broken_file.unlink(missing_ok=True)
            self._begun_file.unlink(missing_ok=True)
        return reason

    def describe(self) -> str | None:
        """Return `broken since ...` or `in use by ...`, or None if the bench is ready."""
        if (reason := self.read_reason()) is not None:
            return f"broken since {reason}"
        with contextlib.suppress(FileNotFoundError), self._lock_file.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return f"in use by {_describe_holder(file.read())}"
        return None

    @contextlib.contextmanager
    def hold(self, *, keeps_state: bool) -> Iterator[None]:
        """Lock the bench for a run during the block.

        Args:
            keeps_state: Whether the device keeps the state of earlier runs. If True, a killed run leaves the
                bench broken. If False, this call repairs a broken bench.

        Raises:
            BenchError: The bench is in use by another run, or is broken.
        """
        with self._locked():
            if not keeps_state:
                self.broken_file.unlink(missing_ok=True)
            if self._begun_file.exists():
                begun = self._begun_file.read_text(encoding="utf-8").strip()
                self.mark_broken(f"the run that began at {begun} was cut short")
            if (reason := self.read_reason()) is not None:
                raise BenchError(
                    f"bench '{self.name}' is broken since {reason}. Look at the device, then:"
                    f" edgekit hil repaired FILE, with its environment file"
                )
            if keeps_state:
                self._begun_file.write_text(_now(), encoding="utf-8")
            try:
                yield
            finally:  # after any error and after Ctrl-C, but not after a kill
                self._begun_file.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, and record which process holds it.

        Raises:
            BenchError: Another process holds the lock.
        """
        self.stem.parent.mkdir(parents=True, exist_ok=True)
        with self._lock_file.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as cause:
                file.seek(0)
                raise BenchError(
                    f"bench '{self.name}' is in use by {_describe_holder(file.read())}; wait for its end"
                ) from cause
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "since": _now()}))
            file.flush()
            yield

    @property
    def _lock_file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.lock")

    @property
    def _begun_file(self) -> Path:
        return self.stem.with_name(f"{self.stem.name}.begun")


def _describe_holder(note: str) -> str:
    try:
        holder = json.loads(note)
        return f"process {holder['pid']} since {holder['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
