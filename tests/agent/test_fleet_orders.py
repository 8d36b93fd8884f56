"""Settings and logs on a device: what the owner fixed stays, secrets stay, one answer for a request."""

import base64
import errno
import json
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pytest
from tests.toolkit.cases import cases
from tests.waiting import wait_for

from edgekit_runtime.agent.documents import LogRequest, Logs
from edgekit_runtime.agent.fleet_orders import (
    FIXED,
    DeviceLogs,
    DeviceSettings,
    pack_lines,
    unpack_lines,
)
from edgekit_runtime.protocol.device_settings import SETTINGS, find_fault
from edgekit_runtime.system.atomic_files import DISK, Disk
from edgekit_runtime.system.recent_log import RecentLines, keep_lines, mask_secrets, read_journal, read_recent

LOGGER = logging.getLogger("edgekit_runtime")


@pytest.fixture(autouse=True)
def logger() -> Iterator[None]:
    level, handlers = LOGGER.level, list(logging.getLogger().handlers)
    yield
    LOGGER.setLevel(level)
    logging.getLogger().handlers[:] = handlers


def make(folder: Path, fixed: dict[str, str] | None = None, *, is_allowed: bool = True) -> DeviceSettings:
    return DeviceSettings(folder, DISK, fixed or {}, is_allowed=is_allowed)


@cases(
    ("key", "value", "is_right"),
    [
        ("log-level", "debug", True),
        ("log-level", "DEBUG; rm", False),
        ("month-mb", "50", True),
        ("month-mb", "-1", False),
        ("month-mb", "nan", False),
        ("month-mb", "1e3", False),
        ("power-w", "0", False),
        ("window", "23:00-01:30", True),
        ("window", "01:00-01:00", False),
        ("window", "1:00-25:00", False),
        ("battery-floor", "0.25", True),
        ("shell", "true", False),
    ],
)
def test_only_settings_of_the_list_in_their_ranges_are_right(key: str, value: str, is_right: bool) -> None:
    assert (find_fault(key, value) == "") == is_right
    assert all(setting.title and setting.accepted for setting in SETTINGS.values())


def test_settings_take_effect_and_what_belongs_to_the_service_is_written_for_it(tmp_path: Path) -> None:
    settings = make(tmp_path)
    settings.follow({})
    assert not (tmp_path / "settings.json").exists()
    settings.follow({"log-level": "warning", "month-mb": "50", "power-w": "12", "colour": "red"})
    assert settings.find_number("month-mb") == 50 and LOGGER.level == logging.WARNING
    written = json.loads((tmp_path / "settings.json").read_bytes())
    assert written == {"settings": {"log-level": "warning", "power-w": "12"}}
    states = settings.list_states(None, 0.0)
    assert (states["log-level"], states["month-mb"]) == ("", "")
    assert "no service" in states["power-w"] and "no setting 'colour'" in states["colour"]
    settings.follow({})
    assert settings.find("month-mb") == "" and LOGGER.level != logging.WARNING
    assert json.loads((tmp_path / "settings.json").read_bytes()) == {"settings": {}}


class FillingDisk(Disk):
    """A disk that is full while `is_full`."""

    is_full = True

    def create(self, path: Path, mode: int) -> BinaryIO:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().create(path, mode)


def test_settings_on_a_full_disk_do_not_stop_the_agent(tmp_path: Path) -> None:
    disk = FillingDisk()
    settings = DeviceSettings(tmp_path, disk, {}, is_allowed=True)
    for disk.is_full in (True, True, False):
        settings.follow({"month-mb": "50", "power-w": "12"})
        assert settings.find_number("month-mb") == 50
        assert (tmp_path / "settings.json").exists() == (not disk.is_full)


def test_what_the_owner_fixed_stays(tmp_path: Path) -> None:
    settings = make(tmp_path, {"month-mb": "10"})
    settings.follow({"month-mb": "50", "cap-kbit-s": "64"})
    assert (settings.find_number("month-mb"), settings.find_number("cap-kbit-s")) == (10, 64)
    assert settings.list_states(None, 0.0) == {"month-mb": FIXED, "cap-kbit-s": ""}


def test_owner_who_takes_no_settings_gets_none(tmp_path: Path) -> None:
    settings = make(tmp_path, is_allowed=False)
    settings.follow({"month-mb": "50", "power-w": "12"})
    assert settings.find("month-mb") == ""
    assert not (tmp_path / "settings.json").exists()
    assert set(settings.list_states(None, 0.0).values()) == {
        "this device's owner takes no settings of the fleet"
    }


@cases(
    "line",
    [
        "camera rtsp://me:hunter2-secret@camera/1 is away",
        "mqtt://u:hunter2-secret@broker/yard",
        "Authorization: Bearer hunter2-secret-token",
        'password="hunter2-secret"',
        "api_key=hunter2-secret&x=1",
        "{'client_secret': 'hunter2-secret'}",
        "token ekt_hunter2-secret was refused",
        "whsec_hunter2-secret",
        "GET https://mirror/a?X-Amz-Signature=hunter2&x=1",
        "GET https://mirror/a?sv=1&sig=hunter2%2Bsecret",
        "Cookie: session=hunter2",
        f"code fleet:8443/{'a' * 64}/hunter2-secretsecret",
        "key Hunter2secretHunter2secretHunter2secretHunter2==",
    ],
)
def test_secrets_are_masked(line: str) -> None:
    (masked,) = mask_secrets([line])
    assert "unter2" not in masked and "***" in masked


def test_private_key_is_masked_over_lines_and_plain_lines_stay() -> None:
    key = ["-----BEGIN PRIVATE KEY-----", "MC4CAQAwBQYDK2Vw", "-----END PRIVATE KEY-----"]
    plain = ["digits 2.0.0: ready in 12 ms, sha256 " + "ab12" * 16, "2026-11-30 12:00:00 INFO stopped"]
    assert mask_secrets([*key, *plain]) == ["*** key ***"] * 3 + plain
    assert mask_secrets(["\x1b[2Jgone\u202e"]) == ["\ufffd[2Jgone\ufffd"]


def test_begin_of_a_key_without_an_end_hides_few_lines() -> None:
    masked = mask_secrets(["unknown model -----BEGIN PRIVATE KEY-----", *["later"] * 200])
    assert masked[:100] == ["*** key ***"] * 100 and masked[150:] == ["later"] * 51


def test_masks_of_hostile_lines_end() -> None:
    """A client's text may be in each line; these took over 20 minutes, and the agent with them."""
    lines = [word * (500 // len(word)) for word in ("token", "password-", "-a", "cookie ", "secret=")]
    masked = mask_secrets(lines * 400)
    assert masked[:5] == [*lines[:4], "secret=***"]


def test_text_of_others_adds_no_line_to_the_log() -> None:
    keep_lines()
    LOGGER.warning("model %s is unknown", "x\n2026-11-30 12:00:00 INFO trusted")
    assert "\ufffd2026-11-30" in read_recent(1)[0]


def answer(logs: DeviceLogs, request: LogRequest) -> Logs:
    answers: list[Logs] = []

    def has_come() -> bool:
        taken = logs.take(request, None)
        answers.extend([taken] if taken else [])
        return bool(answers)

    wait_for(has_come, "the lines")
    return answers[0]


def test_request_is_answered_once_with_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    keep_lines()
    for number in range(30):
        LOGGER.warning("line %s, password=hunter2", number)
    logs, request = DeviceLogs("d1", "", is_allowed=True), LogRequest(request="r1", lines=10)
    taken = answer(logs, request)
    lines = unpack_lines(taken.text, 1 << 20).splitlines()
    assert taken.source == "memory" and len(lines) == 10
    assert "line 29" in lines[-1] and "hunter2" not in str(lines)
    assert logs.take(request, None) is None and logs.take(LogRequest(), None) is None
    assert DeviceLogs("d1", "r1", is_allowed=True).take(request, None) is None  # as after a restart


def test_owner_may_forbid_logs() -> None:
    keep_lines()
    LOGGER.warning("private")
    taken = answer(DeviceLogs("d1", "", is_allowed=False), LogRequest(request="r1", lines=10))
    assert taken.text == "" and "owner does not show" in taken.refusal


def test_lines_that_do_not_fit_lose_the_oldest() -> None:
    lines = [
        f"{number} {base64.b85encode(number.to_bytes(60, 'big') * 4).decode()}" for number in range(1000)
    ]
    lines = [f"{zlib.crc32(line.encode())} {hash(line)} {number}" for number, line in enumerate(lines * 3)]
    packed = pack_lines(lines, 3000)
    kept = unpack_lines(packed, 1 << 20).splitlines()
    assert len(packed) <= 20_000 and 0 < len(kept) < 3000 and kept[-1] == lines[-1]


@pytest.mark.parametrize("text", ["!", "AAAA", base64.b64encode(b"x" * 50).decode()])
def test_malformed_lines_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        unpack_lines(text, 100)


def test_bomb_is_unpacked_to_its_limit() -> None:
    bomb = base64.b64encode(zlib.compress(bytes(50 << 20), 9)).decode()
    assert len(unpack_lines(bomb, 1000)) == 1000


def test_memory_of_lines_is_bounded() -> None:
    handler = RecentLines()
    for _ in range(2000):
        handler.handle(logging.LogRecord("x", 20, "", 0, "y" * 10_000, (), None))
    assert len(handler.lines) == 1000 and max(map(len, handler.lines)) == 500


def test_journal_is_asked_for_our_units_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "journalctl"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("JOURNAL_STREAM", "8:1")
    asked = read_journal(100)
    assert [word for word in asked if word.startswith("--unit=")] == [
        "--unit=edgekit.service",
        "--unit=edgekit-agent.service",
    ]
    assert "--lines=100" in asked
    program.write_text("#!/bin/sh\nexit 1\n")
    assert read_journal(100) == []
