import errno
import json
import os
from pathlib import Path

import pytest
from tests.toolkit import report_sample

from edgekit_runtime.errors import OutputError
from edgekit_toolkit.report.files import write_report


def test_report_is_written_as_page_and_json_of_the_same_document(tmp_path: Path) -> None:
    document = report_sample.packaged()
    page, data = write_report(document, tmp_path, "net-1.0.2-rpi5")

    assert page == tmp_path / "net-1.0.2-rpi5.report.html"
    assert data == tmp_path / "net-1.0.2-rpi5.report.json"
    assert json.loads(data.read_text(encoding="utf-8")) == document
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert sorted(page.parent.iterdir()) == [page, data]


def test_same_document_gives_the_same_bytes(tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write_report(report_sample.packaged(), tmp_path, "net")]
    second = [path.read_bytes() for path in write_report(report_sample.packaged(), tmp_path, "again")]

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


def test_output_error_names_the_folder_the_cause_and_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OutputError, match="No space left on device; free space") as caught:
        write_report(report_sample.packaged(), tmp_path, "net")

    assert str(tmp_path) in str(caught.value)
