"""Results of `edgekit package` appear together or not at all: bad folders, full disks and interrupts."""

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.fork_server import host_server
from tests.toolkit.package_run import (
    Outcome,
    check_refused,
    environment,
    listing,
    mlp,
    package,
    saved,
    tiny,
    without_progress,
)
from tests.waiting import bounded

from edgekit_cli.cli import main
from edgekit_toolkit.pipeline import publish

pytestmark = pytest.mark.usefixtures("home")
EDGEKIT = ("-m", "edgekit_cli")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(mlp(), tmp_path / "net.onnx")


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_an_output_folder_that_is_a_file_is_refused(place: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_refused(lambda *more: package(model, tmp_path / place, *more), 10, "cannot be made")
    assert (tmp_path / "file").read_text() == "mine"


ENDINGS = ["edgepkg", "evidence.json", "recipe.json", "report.html", "report.json"]


@pytest.mark.parametrize(
    "ending",
    [pytest.param(ending, marks=() if ending in ENDINGS[::4] else pytest.mark.long) for ending in ENDINGS],
)
def test_a_folder_in_the_place_of_a_result_is_refused_and_nothing_is_written(
    ending: str, model: Path, tmp_path: Path
) -> None:
    (tmp_path / "out" / f"net-1.0.0-x86-64.{ending}" / "mine").mkdir(parents=True)
    check_refused(
        lambda *more: package(model, tmp_path / "out", *more),
        10,
        rf"a folder lies at net-1.0.0-x86-64.{ending}, the place of a result",
    )
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"net-1.0.0-x86-64.{ending}"]


@pytest.mark.parametrize("end", ["nowhere", "folder"])
def test_links_in_the_places_of_results_are_replaced(end: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "out").mkdir()
    for ending in ENDINGS:
        (tmp_path / "out" / f"net-1.0.0-x86-64.{ending}").symlink_to(tmp_path / end)
    assert package(model, tmp_path / "out").code == 0
    assert sorted(listing(tmp_path / "out")) == [f"net-1.0.0-x86-64.{one}" for one in ENDINGS]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "net.onnx", "out"]
    assert list((tmp_path / "folder").iterdir()) == []


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system in memory."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mounted(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        if os.geteuid() != 0 or shutil.which("mount") is None:
            pytest.skip("only root can mount a file system")
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("no file system can be mounted here")
        return folder

    yield mounted
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_a_read_only_output_folder_is_refused(
    mount: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    folder = mount("ro")
    check_refused(lambda *more: package(model, folder, *more), 10, "is not writable")
    check_refused(lambda *more: package(model, folder / "below", *more), 10, "cannot be made")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_folder_of_somebody_else_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o555)
    check_refused(lambda *more: package(model, tmp_path / "out", *more), 10, "is not writable")


# Too small for the package, for recipe or evidence, and for the report.
@pytest.mark.parametrize(
    "size_kib", [4, *(pytest.param(size, marks=pytest.mark.long) for size in (8, 12)), 48]
)
def test_a_full_disk_leaves_nothing(
    size_kib: int, mount: Callable[[str], Path], model: Path, tmp_path: Path
) -> None:
    folder = mount(f"size={size_kib}k")
    outcome = package(model, folder)
    assert (outcome.code, outcome.stdout) == (10, "")
    assert re.fullmatch(rf"edgekit: .*{folder}.*No space left.*\n", outcome.stderr)
    assert ".edgekit-" not in outcome.stderr
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "delay_s", [0, 0.6, *(pytest.param(delay_s, marks=pytest.mark.long) for delay_s in (0.3, 0.9, 1.2))]
)
def test_an_interrupt_at_any_moment_leaves_all_or_nothing(delay_s: float, tmp_path: Path) -> None:
    source, data = tiny("digits_cnn")
    out = tmp_path / "out"
    options = ("--target", "rpi4", "-o", out, "--threads", "1", "--search-seconds", "1")
    command = [sys.executable, *EDGEKIT, "package", *map(str, (source, *data, *options))]
    started = host_server().popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with bounded(started) as process:
        while not out.exists() and process.poll() is None:  # it has begun
            time.sleep(0.01)
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate()
    if out.exists():  # it was done by then
        assert len(listing(out)) == 5
    else:
        assert (process.returncode, err.strip()) == (130, "interrupted")


class InterruptOnImport:
    """Sends Ctrl-C to this process when a module is looked for."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, *_: object) -> None:
        if name == self.name:
            os.kill(os.getpid(), signal.SIGINT)


def test_an_interrupt_while_modules_are_imported_waits_for_them(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "edgekit_host.terminal"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [InterruptOnImport(name), *sys.meta_path])
    outcome = package(model, tmp_path / "out")
    assert (outcome.code, outcome.stderr.strip()) == (130, "interrupted")
    assert name in sys.modules
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_judging_leaves_nothing(model: Path, tmp_path: Path) -> None:
    metric = tmp_path / "mine.py"
    metric.write_text("import os, signal\ndef f(o, r, y): os.kill(os.getpid(), signal.SIGINT)\n")
    # In a process of its own: the signal would reach whatever else runs in this one.
    options = ("--target", "rpi4", "-o", tmp_path / "out", "--metric", f"{metric}:f", "--json")
    command = [sys.executable, *EDGEKIT, "package", *map(str, (model, *options))]
    with host_server().popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate()
    outcome = Outcome(process.returncode, out, err)
    assert (outcome.code, outcome.stderr.strip()) == (130, "interrupted")
    assert outcome.error["type"] == "KeyboardInterrupt"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "function", ["pipeline.publish.write_evidence", "report.files.write_text_atomically"]
)
def test_an_interrupt_while_writing_leaves_the_earlier_results(
    function: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert package(model, tmp_path / "out").code == 0
    before = listing(tmp_path / "out")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"edgekit_toolkit.{function}", interrupt)
    assert package(model, tmp_path / "out", "--batch", 2).code == 130
    assert listing(tmp_path / "out") == before


def test_an_interrupt_while_results_appear_waits_for_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, moved = Path.replace, []

    def interrupt(self: Path, target: Path) -> Path:
        moved.append(target.name)
        if len(moved) == 2:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), publish.staging(tmp_path) as stage:
        for name in "abc":
            (stage / name).write_text(name)
    assert listing(tmp_path) == {"a": b"a", "b": b"b", "c": b"c"}


def test_a_reader_that_goes_away_ends_the_output_quietly(model: Path, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    options = ("--target", "rpi4", "--backend", "ort", "-o", tmp_path / "out", "--search-seconds", "0")
    command = [sys.executable, *EDGEKIT, "package", *map(str, (model, *options))]
    with os.fdopen(writing, "wb") as pipe:
        process = host_server().popen(command, env=environment(), stdout=pipe, stderr=subprocess.PIPE)
        _, err = process.communicate()
    assert (process.returncode, without_progress(err)) == (141, b"")
    assert len(listing(tmp_path / "out")) == 5


def test_a_terminal_without_unicode_shows_the_result(model: Path, tmp_path: Path) -> None:
    with (
        io.TextIOWrapper(io.BytesIO(), encoding="ascii") as terminal,  # as Python opens it with LC_ALL=C
        contextlib.redirect_stdout(terminal),
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        options = ("-t", "rpi4", "--backend", "ort", "-o", tmp_path / "out", "--search-seconds", "0")
        assert main(["package", *map(str, (model, *options))]) == 0
        terminal.flush()
        assert without_progress(errors.getvalue().encode()) == b""
        assert b"PACKAGED" in terminal.buffer.getvalue()  # type: ignore[attr-defined]  # of BytesIO
