import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit import report_sample

from edgekit_runtime.errors import OutputError
from edgekit_toolkit.report.files import write_report


def test_report_is_written_as_page_and_json_of_the_same_document(tmp_path: Path) -> None:
    document = report_sample.packaged()
    page, data = write_report(document, tmp_path / "new" / "folder", "net-1.0.2-rpi5")

    assert page == tmp_path / "new" / "folder" / "net-1.0.2-rpi5.report.html"
    assert data == tmp_path / "new" / "folder" / "net-1.0.2-rpi5.report.json"
    assert json.loads(data.read_text(encoding="utf-8")) == document
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(page.parent.iterdir()) == [page, data]


def test_same_document_gives_the_same_bytes(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_report(report_sample.packaged(), tmp_path / "a", "net")]
    second = [path.read_bytes() for path in write_report(report_sample.packaged(), tmp_path / "b", "net")]

    assert first == second


def test_earlier_report_is_replaced(tmp_path: Path) -> None:
    write_report(report_sample.refused(), tmp_path, "net")
    page, data = write_report(report_sample.packaged(), tmp_path, "net")

    assert "Refused" not in page.read_text(encoding="utf-8")
    assert json.loads(data.read_text(encoding="utf-8"))["outcome"]["kind"] == "packaged"


def test_folder_that_is_a_file_raises_output_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")

    with pytest.raises(OutputError, match="taken"):
        write_report(report_sample.packaged(), tmp_path / "taken", "net")


def test_name_too_long_for_the_file_system_raises_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="too long"):
        write_report(report_sample.packaged(), tmp_path, "n" * 300)

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("failing_call", [1, 2])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_full_disk_or_interrupt_keeps_the_earlier_report_and_leaves_nothing_behind(
    error: BaseException, failing_call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_report(report_sample.refused(), tmp_path, "net")
    before = [path.read_bytes() for path in paths]
    calls: list[int] = []
    flush = os.fsync

    def fail(descriptor: int) -> Any:
        calls.append(descriptor)
        if len(calls) == failing_call:
            raise error
        return flush(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    expected = OutputError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(expected):
        write_report(report_sample.packaged(), tmp_path, "net")

    assert [path.read_bytes() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_output_error_names_the_folder_the_cause_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left on device; give a folder") as caught:
        write_report(report_sample.packaged(), tmp_path, "net")

    assert str(tmp_path) in str(caught.value)
