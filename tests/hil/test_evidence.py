"""Files of evidence: written, read again, and honest about their source."""

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path
from typing import Literal

import pytest
from tests.hil.evidence_parts import EVIDENCE

from edgekit_host.evidence import (
    Checkout,
    Evidence,
    NetworkTimes,
    describe_source,
    find_hil_folder,
    read_checkout,
    read_evidence,
    read_folders,
    read_newest,
    write_evidence,
)
from edgekit_runtime.errors import BenchError


def test_written_evidence_reads_back_equal(tmp_path: Path) -> None:
    path = write_evidence(EVIDENCE, tmp_path / "new")

    assert path.name == "rpi5-desk-2026-11-23T100000.json"
    assert read_evidence(path) == EVIDENCE
    times = NetworkTimes("2026-11-23", "onnxruntime 1.24.4", "0a", {"dense": 0.01})
    timed = dataclasses.replace(EVIDENCE, network_times=times)
    assert read_evidence(write_evidence(timed, tmp_path)) == timed
    assert EVIDENCE.count("passed") == 1


def test_folders_are_read_oldest_first(tmp_path: Path) -> None:
    newer = dataclasses.replace(EVIDENCE, date="2026-11-24T10:00:00+00:00")
    write_evidence(newer, tmp_path / "a")
    write_evidence(EVIDENCE, tmp_path / "b")

    assert read_folders([tmp_path / "a", tmp_path / "b", tmp_path / "none"]) == [EVIDENCE, newer]


def with_outcomes(evidence: Evidence, outcome: Literal["failed", "skipped"]) -> Evidence:
    """Return later evidence, in which every test ended so."""
    tests = tuple(dataclasses.replace(each, outcome=outcome) for each in evidence.tests)
    return dataclasses.replace(evidence, date="2026-11-25T10:00:00+00:00", tests=tests)


def test_newest_evidence_leaves_out_what_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    folder = find_hil_folder() / "evidence"
    mine = dataclasses.replace(EVIDENCE, target="my-board")
    write_evidence(mine, folder)
    write_evidence(with_outcomes(mine, "skipped"), folder)
    (folder / "torn.json").write_text("{")

    assert read_newest("my-board") == [mine]


def test_run_in_which_everything_failed_takes_the_place_of_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    mine = dataclasses.replace(EVIDENCE, target="my-board")
    failed = with_outcomes(mine, "failed")
    for evidence in (mine, failed):
        write_evidence(evidence, find_hil_folder() / "evidence")

    assert read_newest("my-board") == [failed]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2, expected 1; update edgekit"),
        ({"kind": "dreamt"}, "one of real, emulated, simulated"),
        ({"colour": 1}, "unknown setting 'colour'"),
        (None, "no evidence"),
    ],
)
def test_malformed_evidence_is_refused(
    tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    path = write_evidence(EVIDENCE, tmp_path)
    content = "{" if change is None else json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(content)

    with pytest.raises(BenchError, match=message):
        read_evidence(path)


@pytest.mark.parametrize(
    ("written", "is_dirty"),
    [
        ("bench.yaml", False),  # where docs/guide/hil.md says that it is
        ("hil/evidence/rpi5-desk.json", False),
        ("hil/edgekit_hil/new.py", True),
        ("hil/README.md", True),
    ],
)
def test_only_changes_of_the_source_make_evidence_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, *, is_dirty: bool
) -> None:
    (tmp_path / "hil" / "edgekit_hil").mkdir(parents=True)
    (tmp_path / "hil" / "evidence").mkdir()
    for name in ("hil/README.md", "hil/edgekit_hil/a.py", "hil/evidence/README.md"):
        (tmp_path / name).write_text("")
    shutil.copy(Path(__file__).parents[2] / ".gitignore", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    monkeypatch.setattr("edgekit_host.evidence.PACKAGE", tmp_path / "hil" / "edgekit_hil")

    (tmp_path / written).write_text("new")

    assert read_checkout().is_dirty == is_dirty


@pytest.mark.parametrize(
    ("evidence", "text"),
    [
        (EVIDENCE, "this commit"),
        (dataclasses.replace(EVIDENCE, commit="b" * 40), "commit bbbbbbbbb"),
        (
            dataclasses.replace(EVIDENCE, is_dirty=True),
            "commit aaaaaaaaa with changes that were not committed",
        ),
        (dataclasses.replace(EVIDENCE, commit=""), "no commit (an installed release)"),
    ],
)
def test_evidence_says_which_source_it_is_of(evidence: Evidence, text: str) -> None:
    assert describe_source(evidence, Checkout("a" * 40, is_dirty=False)) == text
