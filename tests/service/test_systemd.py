"""What systemd is told, and the unit that is written for it."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from edgekit_runtime.cli import main
from edgekit_runtime.service.systemd import Notifier


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    listener.bind(str(tmp_path / "notify"))
    listener.settimeout(10)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    return listener


def test_systemd_hears_that_the_loop_turns_between_ready_and_stopping(
    told: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))

    async def serve() -> None:
        notifier = Notifier(asyncio.get_running_loop())
        await asyncio.sleep(0.2)
        notifier.notify_ready("ready at x")
        await asyncio.sleep(0.2)
        notifier.notify_stopping()
        await asyncio.sleep(0.2)

    with told:
        asyncio.run(serve())
        told.setblocking(False)
        heard = []
        while not heard or heard[-1] != b"STOPPING=1":
            heard.append(told.recv(1000))
        with pytest.raises(BlockingIOError):
            told.recv(1000)
    assert heard[0] == b"READY=1\nSTATUS=ready at x"
    assert len(heard) >= 4
    assert set(heard[1:-1]) == {b"WATCHDOG=1"}
    assert "NOTIFY_SOCKET" not in os.environ


def test_systemd_waits_for_a_start_that_takes_long(
    told: socket.socket,
) -> None:
    heard: list[bytes] = []

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        notifier = Notifier(loop, extension_s=0.06)
        notifier.notify_starting()
        while len(heard) < 2:  # read as they come: a socket holds ten messages
            heard.append(await loop.sock_recv(told, 1000))
        notifier.notify_ready("x")
        while not heard[-1].startswith(b"READY=1"):
            heard.append(await loop.sock_recv(told, 1000))
        await asyncio.sleep(0.2)

    with told:
        told.setblocking(False)
        asyncio.run(asyncio.wait_for(serve(), 60))
        with pytest.raises(BlockingIOError):
            told.recv(1000)
    assert set(heard[:-1]) == {b"EXTEND_TIMEOUT_USEC=60000"}


def test_without_systemd_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    loop = asyncio.new_event_loop()
    notifier = Notifier(loop)
    notifier.notify_starting()
    notifier.notify_ready("x")
    notifier.notify_stopping()
    loop.close()


def test_watchdog_of_another_process_is_left_to_it(
    told: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "1000")
    monkeypatch.setenv("WATCHDOG_PID", "1")

    async def serve() -> None:
        Notifier(asyncio.get_running_loop()).notify_ready("x")
        await asyncio.sleep(0.05)

    with told:
        asyncio.run(serve())
        assert told.recv(1000).startswith(b"READY=1")
        told.setblocking(False)
        with pytest.raises(BlockingIOError):
            told.recv(1000)


def test_unit_leaves_devices_open_and_its_state_to_a_user_who_can_install(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["serve", "--print-unit"]) == 0
    settings = capsys.readouterr().out.splitlines()
    # systemd.exec(5): ProtectClock implies DeviceAllow=char-rtc, so that no other device can be opened; the
    # StateDirectory of a DynamicUser lies below /var/lib/private, which nobody but root may enter.
    assert not {"ProtectClock=yes", "PrivateDevices=yes", "DynamicUser=yes"} & set(settings)
    assert {"User=edgekit", "StateDirectory=edgekit"} <= set(settings)


def test_unit_passes_the_checks_of_systemd(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    assert main(["serve", "--print-unit"]) == 0
    unit = tmp_path / "edgekit.service"
    text = capsys.readouterr().out
    # The command need not be installed where this is tested.
    unit.write_text(text.replace(f"{Path(sys.executable).parent}/edgekit-device", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    about_ours = [line for line in done.stderr.splitlines() if "edgekit" in line]
    assert (done.returncode, about_ours) == (0, [])
