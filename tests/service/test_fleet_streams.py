"""The streams that the fleet wants: a file that the service follows."""

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import write_cell_detector
from tests.service.service_parts import Running, ask, get_bytes, make_config, running
from tests.service.stream_parts import draw_cells, write_video
from tests.waiting import wait_for

from edgekit_runtime.agent.fleet_orders import WishFile
from edgekit_runtime.client.control import read_fleet_streams
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions, check_fleet_streams
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import FleetStreamOptions
from edgekit_runtime.service.streams.fleet_streams import FleetStreams
from edgekit_runtime.system.atomic_files import DISK, Disk

pytestmark = pytest.mark.usefixtures("imported_opencv")

SECRET = "rtsp://me:secret@camera/1"  # noqa: S105


class NotedStreams:
    """Notes which streams run; some names are taken by others."""

    max_pixels = 1000

    def __init__(self, *taken: str) -> None:
        self.names: dict[str, Any] = dict.fromkeys(taken, "other")
        self.changes: list[str] = []

    def has(self, name: str) -> bool:
        return name in self.names

    def add(self, name: str, options: StreamOptions) -> None:
        if options.source == "refused":
            raise ConfigError(f"source {SECRET} is refused")
        self.names[name] = options.model
        self.changes.append(f"+{name}")

    def remove(self, name: str) -> None:
        del self.names[name]
        self.changes.append(f"-{name}")


def write(path: Path, **streams: Mapping[str, Any]) -> None:
    path.write_text(json.dumps({"streams": streams}))
    os.utime(path, ns=(0, path.stat().st_mtime_ns + len(path.read_bytes())))


def follow(path: Path, streams: NotedStreams, *, allows_files: bool = False) -> FleetStreams:
    return FleetStreams(path, streams, allows_files=allows_files)  # type: ignore[arg-type]


YARD = {"model": "m", "source": "0"}


def test_streams_start_and_stop_and_are_replaced_as_the_file_says(tmp_path: Path) -> None:
    path, streams = tmp_path / "s.json", NotedStreams()
    fleet = follow(path, streams)
    fleet.look()
    write(path, yard=YARD)
    fleet.look()
    fleet.look()
    write(path, yard=YARD, door=YARD)
    fleet.look()
    write(path, yard={**YARD, "model": "m2"}, door=YARD)
    fleet.look()
    path.unlink()
    fleet.look()
    assert streams.changes == ["+yard", "+door", "-yard", "+yard", "-door", "-yard"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"streams":{"yard":{}}}',
        b'{"streams":{"yard":{"model":"m","source":"0","every":0}}}',
    ],
)
def test_wrong_file_changes_nothing_and_is_logged_once(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, streams = tmp_path / "s.json", NotedStreams()
    fleet = follow(path, streams)
    write(path, yard=YARD)
    fleet.look()
    path.write_bytes(content)
    fleet.look()
    fleet.look()
    assert streams.changes == ["+yard"]
    assert len([record for record in caplog.records if "stay as they are" in record.message]) == 1


def test_name_of_another_stream_is_not_touched_and_taken_once_it_is_free(tmp_path: Path) -> None:
    path, streams = tmp_path / "s.json", NotedStreams("yard")
    fleet = follow(path, streams)
    write(path, yard=YARD)
    fleet.look()
    state = fleet.to_json()["yard"]
    assert (state["state"], "has a stream of this name" in state["error"]) == ("failed", True)
    write(path)
    fleet.look()
    assert (streams.names, streams.changes) == ({"yard": "other"}, [])
    write(path, yard=YARD)
    fleet.look()
    del streams.names["yard"]
    fleet.look()
    assert streams.changes == ["+yard"]


def test_refused_stream_states_the_reason_without_the_password(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, streams = tmp_path / "s.json", NotedStreams()
    fleet = follow(path, streams)
    write(path, yard={**YARD, "source": "refused"}, door=YARD)
    fleet.look()
    write(path, yard={**YARD, "source": "refused"})
    fleet.look()
    fleet.look()
    assert fleet.to_json()["yard"]["error"] == "source rtsp://camera/1 is refused"
    assert "secret" not in caplog.text
    assert (streams.changes, caplog.text.count("is refused")) == (["+door", "-door"], 2)


@pytest.mark.parametrize("change", [{"sinks": ["file:/etc/x"]}, {"source": "gstreamer:a ! filesink"}])
def test_fleet_writes_files_only_where_the_owner_allows_it(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "s.json"
    write(path, yard={**YARD, **change})
    for allows_files, changes in ((False, []), (True, ["+yard"])):
        streams = NotedStreams()
        fleet = follow(path, streams, allows_files=allows_files)
        fleet.look()
        assert streams.changes == changes
    assert not streams.names.keys() - {"yard"}


@pytest.mark.parametrize(
    ("setting", "most", "reason"),
    [("max_pixels", 1000, "owner allows 1000"), ("max_queued", 4096, "a fleet may ask for 4096")],
)
def test_fleet_gets_no_more_memory_than_is_allowed(
    tmp_path: Path, setting: str, most: int, reason: str
) -> None:
    path, streams = tmp_path / "s.json", NotedStreams()
    write(path, yard={**YARD, setting: most + 1})
    fleet = follow(path, streams)
    fleet.look()
    assert reason in fleet.to_json()["yard"]["error"]
    write(path, yard={**YARD, setting: most})
    fleet.look()
    assert streams.changes == ["+yard"]


# What the agent writes


class FullDisk(Disk):
    def __init__(self) -> None:
        self.is_full = True

    def create(self, path: Path, mode: int) -> Any:
        if self.is_full:
            raise OSError(28, "No space left on device")
        return super().create(path, mode)


def test_agent_writes_only_changes_and_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    WishFile(tmp_path / "streams.json", "streams", DISK).write({})
    assert not path.exists()
    file = WishFile(tmp_path / "streams.json", "streams", DISK)
    file.write({"yard": StreamOptions(model="m", source=SECRET).to_json()})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    written = path.stat().st_ino
    WishFile(tmp_path / "streams.json", "streams", DISK).write(
        {"yard": StreamOptions(model="m", source=SECRET).to_json()}
    )
    assert path.stat().st_ino == written
    file.write({})
    assert json.loads(path.read_bytes()) == {"streams": {}}


def test_full_disk_is_logged_once_and_tried_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, disk = tmp_path / "streams.json", FullDisk()
    file, streams = (
        WishFile(tmp_path / "streams.json", "streams", disk),
        {"yard": StreamOptions(model="m", source="0").to_json()},
    )
    file.write(streams)
    file.write(streams)
    assert (path.exists(), caplog.text.count("not written")) == (False, 1)
    disk.is_full = False
    file.write(streams)
    assert "yard" in json.loads(path.read_bytes())["streams"]


@pytest.mark.parametrize(
    ("streams", "reason"),
    [
        ({"a/b": YARD}, "is no name"),
        ({"": YARD}, "is no name"),
        ({"yard": {**YARD, "source": "a\nb"}}, "unprintable characters"),
        ({"yard": {**YARD, "sinks": ("\ud800",)}}, "unprintable characters"),
        ({f"s{number}": YARD for number in range(17)}, "at most 16"),
        ({"yard": {**YARD, "sinks": ("x" * 9000,)}}, "at most 8192"),
    ],
)
def test_streams_beyond_a_limit_are_refused(streams: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_fleet_streams({name: StreamOptions(**settings) for name, settings in streams.items()})


def test_settings_that_are_not_stated_are_left_out() -> None:
    options = StreamOptions(model="m", source="0", sinks=("stdout",), min_score=0.0, all_frames=False)
    stated = {"model": "m", "source": "0", "sinks": ["stdout"], "min_score": 0.0, "all_frames": False}
    assert options.to_json() == stated
    assert StreamOptions(model="m", source="0").to_json() == {"model": "m", "source": "0"}


# A real service


@pytest.fixture
def service(maker: PackageMaker, tmp_path: Path) -> Iterator[Running]:
    packages = tmp_path / "packages"
    packages.mkdir()
    write_cell_detector(maker, packages / "cells.edgepkg")
    config = make_config(
        tmp_path,
        fleet_streams=FleetStreamOptions(file=str(tmp_path / "streams.json"), allows_files=True),
    )
    with running(config, PackageFiles([packages], maker.trust)) as service:
        service.call(service.service.watch)
        yield service


def test_file_of_the_agent_becomes_lines_of_answers(service: Running, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(8))
    lines, file = tmp_path / "yard.jsonl", WishFile(tmp_path / "streams.json", "streams", DISK)
    assert read_fleet_streams(service.socket_path) == {}
    settings = StreamOptions(model="cells", source=str(video), sinks=(f"file:{lines}",), every=2)
    file.write({"yard": settings.to_json()})
    wait_for(lambda: lines.exists() and lines.read_bytes().endswith(b"\n"), "answers")
    answer = json.loads(lines.read_bytes().splitlines()[0])
    assert (answer["stream"], answer["detections"][0]["label"]) == ("yard", "red")
    assert read_fleet_streams(service.socket_path)["yard"]["model"] == "cells"
    file.write({})
    wait_for(lambda: ask(service, get_bytes("/v2/streams")).json == {"streams": []}, "the end of the stream")
