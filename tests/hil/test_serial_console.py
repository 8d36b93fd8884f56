"""Benches with a serial console, on a serial port of this machine or behind a server of serial lines."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.hil.serial_console import BOOTING, LOGIN, PROMPT, SerialConsole
from tests.hil.ssh_board import SshBoard, run_ssh_board
from yaml import safe_dump, safe_load

from edgekit_hil.benches.bench_file import BenchFile, read_bench
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_hil.benches.opening import open_bench
from edgekit_runtime.errors import BenchError, BenchUnavailableError

SHELL = {"ShellDriver": {"prompt": PROMPT, "login_prompt": LOGIN, "username": "root"}}


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshBoard]:
    with run_ssh_board(tmp_path_factory.mktemp("board")) as board:
        yield board


@pytest.fixture
def console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SerialConsole]:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "edgekit"))
    (tmp_path / "home").mkdir()
    console = SerialConsole(tmp_path / "home")
    yield console
    console.close()


@pytest.fixture(params=[False, True], ids=["serial port", "network"])
def line(console: SerialConsole, request: pytest.FixtureRequest) -> dict[str, Any]:
    return console.describe(over_network=request.param)


def write_bench(
    board: SshBoard, path: Path, resources: dict[str, Any], drivers: dict[str, Any], *, has_ssh: bool
) -> BenchFile:
    document = safe_load(board.write_bench(path).read_text())
    main = document["targets"]["main"]
    main["resources"] = {**(main["resources"] if has_ssh else {}), **resources}
    main["drivers"] = {**(main["drivers"] if has_ssh else {}), "SerialDriver": {}, **drivers}
    path.write_text(safe_dump(document))
    return read_bench(path)


def make_switch(console: SerialConsole, tmp_path: Path) -> dict[str, Any]:
    """Return a switch that ends the shell, after which the console shows a boot."""
    off = f"pkill -9 -P {console.board_pid}; echo second >{tmp_path}/boot_id"
    return {"ExternalPowerDriver": {"cmd_off": f"sh -c '{off}'", "cmd_on": "true", "delay": 0.1}}


@pytest.mark.parametrize("drivers", [{}, SHELL], ids=["console", "login"])
def test_console_beside_ssh_is_there_for_tests_and_commands_go_by_ssh(
    board: SshBoard, tmp_path: Path, line: dict[str, Any], drivers: dict[str, Any]
) -> None:
    file = write_bench(board, tmp_path / "bench.yaml", line, drivers, has_ssh=True)
    with open_bench(file) as bench, bench.open_folder("console", "a test") as device:
        assert type(bench.command).__name__ == "SSHDriver"
        console = bench.target.get_driver("ConsoleProtocol")

        console.sendline("")
        console.expect(LOGIN, timeout=10)
        console.sendline("root")
        console.expect(PROMPT, timeout=10)
        console.sendline(f"echo by the console >{device.folder}/said")
        console.expect(PROMPT, timeout=10)

        assert device.run("cat said") == "by the console"


def test_console_shows_the_boot_after_a_power_cut(
    board: SshBoard,
    console: SerialConsole,
    line: dict[str, Any],
    tmp_path: Path,
) -> None:
    (tmp_path / "boot_id").write_text("first\n")
    switch = make_switch(console, tmp_path)
    file = write_bench(board, tmp_path / "bench.yaml", line, switch, has_ssh=True)
    with open_bench(file) as bench:
        seen = bench.target.get_driver("ConsoleProtocol")
        seen.sendline("root")
        seen.expect(PROMPT, timeout=10)

        replace(bench, boot_id=str(tmp_path / "boot_id")).cut_power()

        seen.expect(BOOTING, timeout=10)


def test_console_that_is_missing_hinders_no_test_over_ssh(board: SshBoard, tmp_path: Path) -> None:
    line = {"RawSerialPort": {"port": str(tmp_path / "none")}}
    file = write_bench(board, tmp_path / "bench.yaml", line, {}, has_ssh=True)

    with open_bench(file) as bench, bench.open_folder("console", "a test") as device:
        assert device.run("echo still") == "still"


def test_board_with_a_console_alone_runs_commands_and_takes_files(
    board: SshBoard, tmp_path: Path, line: dict[str, Any]
) -> None:
    file = write_bench(board, tmp_path / "bench.yaml", line, SHELL, has_ssh=False)
    content = bytes(range(256)) * 9
    (tmp_path / "there").write_bytes(content)

    with open_bench(file) as bench, bench.open_folder("console", "a test") as device:
        result = device.try_run("echo 'two  blanks'; echo wrong >&2; exit 3")
        remote = device.put(tmp_path / "there", "file")

        assert bench.facts.architecture == "x86_64"
        assert (result.exit_code, result.output) == (3, "two  blanks\nwrong")  # a console has one stream
        assert device.edgekit("status")["models"] == []
        assert Path(remote).read_bytes() == content


def test_board_with_a_console_alone_boots_and_logs_in_again_after_a_power_cut(
    board: SshBoard, console: SerialConsole, tmp_path: Path
) -> None:
    """With labgrid's own strategy, which also switches the board on at the begin."""
    (tmp_path / "boot_id").write_text("first\n")
    drivers = {**SHELL, **make_switch(console, tmp_path), "ShellStrategy": {}}
    line = console.describe(over_network=True)
    file = write_bench(board, tmp_path / "bench.yaml", line, drivers, has_ssh=False)
    with open_bench(file) as bench, bench.open_folder("console", "a test") as device:
        (tmp_path / "boot_id").write_text("first\n")
        device.run("echo kept >kept")

        replace(bench, boot_id=str(tmp_path / "boot_id")).cut_power()

        assert device.run("cat kept") == "kept"


def test_console_that_is_unplugged_in_a_test_breaks_the_bench(
    board: SshBoard, console: SerialConsole, tmp_path: Path
) -> None:
    line = console.describe(over_network=True)
    file = write_bench(board, tmp_path / "bench.yaml", line, SHELL, has_ssh=False)
    with (
        open_bench(file) as bench,
        pytest.raises(BenchError, match="the device did not run"),
        bench.open_folder("console", "a test") as device,
    ):
        console.unplug()
        device.run("echo still")

    with pytest.raises(BenchError, match=r"is broken since .*: after a test: the device did not run"):
        BenchLock.of(file).hold(keeps_state=True).__enter__()


@pytest.mark.parametrize(
    ("resource", "message"),
    [
        ({"RawSerialPort": {"port": "/dev/none"}}, "Could not open serial port /dev/none: .*No such file"),
        (
            {"NetworkSerialPort": {"host": "127.0.0.1", "port": 1, "protocol": "raw"}},
            "Could not open serial port socket://127.0.0.1:1/: .*refused",
        ),
    ],
)
def test_board_whose_console_cannot_be_opened_is_refused_with_the_reason(
    board: SshBoard, console: SerialConsole, tmp_path: Path, resource: dict[str, Any], message: str
) -> None:
    file = write_bench(board, tmp_path / "bench.yaml", resource, SHELL, has_ssh=False)

    with pytest.raises(BenchUnavailableError, match=f"bench 'stand-in': {message}"), open_bench(file):
        pass


def test_console_on_which_nobody_asks_for_a_login_is_refused(
    board: SshBoard, console: SerialConsole, tmp_path: Path
) -> None:
    shell = {"ShellDriver": {**SHELL["ShellDriver"], "login_prompt": "jetson login: ", "login_timeout": 1}}
    line = console.describe(over_network=False)
    file = write_bench(board, tmp_path / "bench.yaml", line, shell, has_ssh=False)

    with pytest.raises(BenchUnavailableError, match="exceeded during waiting for login"), open_bench(file):
        pass


def test_two_files_of_one_serial_line_share_a_lock_and_the_board_keeps_its_state(
    board: SshBoard, tmp_path: Path, line: dict[str, Any]
) -> None:
    first = write_bench(board, tmp_path / "a.yaml", line, SHELL, has_ssh=False)
    second = write_bench(board, tmp_path / "b.yaml", line, SHELL, has_ssh=False)
    (tmp_path / "b.yaml").write_text((tmp_path / "b.yaml").read_text().replace("stand-in", "shelf"))

    assert first.keeps_state
    with (
        BenchLock.of(first).hold(keeps_state=True),
        pytest.raises(BenchError, match="is in use by process"),
        open_bench(read_bench(second.path)),
    ):
        pass
