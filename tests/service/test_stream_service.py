"""Streams of a real service: videos in, boxes out, and who may do what."""

import base64
import contextlib
import functools
import http.server
import json
import os
import resource
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.free_port import free_port
from tests.runtime.conftest import PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.runtime.test_sound import make_wav
from tests.service.answer_parts import draw, encode, write_cell_detector
from tests.service.serve_parts import TOKEN, Served, environment, served
from tests.service.service_parts import Replies, Running, ask, get_bytes, make_config, post_bytes, running
from tests.service.stream_parts import draw_cells, read_lines, write_video
from tests.service.test_sound_answers import RATE, SECOND, code, write_level_meter
from tests.service.wiring_parts import load
from tests.waiting import SHARED_S, bounded, is_running, wait_for

from edgekit_runtime.cli import main
from edgekit_runtime.errors import ConfigError
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import read_config
from edgekit_runtime.service.options.http import LiveOptions
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.resources import MediaLimits

pytestmark = pytest.mark.usefixtures("imported_opencv")


@pytest.fixture(scope="module")
def folder_of_cells(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cells")
    (folder / "packages").mkdir()
    write_cell_detector(maker, folder / "packages" / "cells.edgepkg")
    return folder


@pytest.fixture(scope="module")
def cells(maker: PackageMaker, folder_of_cells: Path) -> Iterator[Running]:
    config = make_config(folder_of_cells, live=LiveOptions(max_viewers=3))
    with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
        yield service


def list_streams(service: Running) -> list[dict[str, Any]]:
    streams: list[dict[str, Any]] = ask(service, get_bytes("/v2/streams")).json["streams"]
    return streams


def answers(lines: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (line for line in lines if "frame" in line)


def test_video_becomes_boxes_in_pixels_of_its_frames(cells: Running, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(8))
    order = {"model": "cells", "source": str(video), "all_frames": True, "min_score": 0.5, "name": "yard"}
    lines = list(read_lines(cells, order))
    assert [line["state"] for line in lines if "state" in line] == ["opening", "running", "ended"]
    boxes = [line["detections"] for line in answers(iter(lines))]
    assert [box[0]["label"] for box in boxes] == ["red"] * 8
    expected = [[32 * (number % 4), 0, 32 * (number % 4) + 32, 32] for number in range(8)]
    assert np.allclose([box[0]["box"] for box in boxes], expected, atol=1)
    wait_for(lambda: not list_streams(cells), "the end of the stream")


def test_every_second_frame_of_a_folder_of_pictures(cells: Running, tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    for number, picture in enumerate(draw_cells(6)):
        (tmp_path / f"{number}.png").write_bytes(encode(picture))
    (tmp_path / "0b.jpg").write_bytes(b"no picture")
    (tmp_path / "0c.jpg").write_bytes(b"")
    (tmp_path / "0d.jpg").mkdir()
    os.mkfifo(tmp_path / "0e.jpg")
    os.rename(tmp_path / "1.png", os.fsencode(tmp_path) + b"/1\xe9.png")  # noqa: PTH104  # of Latin-1
    (tmp_path / "notes.txt").write_text("no picture either")
    order = {"model": "cells", "source": str(tmp_path), "every": 2}
    columns = [line["detections"][0]["box"][0] for line in answers(read_lines(cells, order))]
    assert columns == [0, 64, 0]


def test_folder_without_pictures_is_named(cells: Running, tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    (tmp_path / "a.jpg").write_bytes(b"no picture")
    *_, end = read_lines(cells, {"model": "cells", "source": str(tmp_path)})
    assert (end["state"], f"{tmp_path} holds no picture" in end["error"]) == ("failed", True)


def test_photographs_have_as_many_pixels_as_media_may_have(
    maker: PackageMaker, folder_of_cells: Path, tmp_path: Path
) -> None:
    """12 million pixels, as of a telephone; one of 25.1 million is named."""
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    (tmp_path / "1.jpg").write_bytes(encode(np.zeros((3000, 4000, 3), np.uint8), "JPEG"))
    (tmp_path / "2.jpg").write_bytes(encode(np.zeros((5000, 5020), np.uint8), "JPEG"))
    for media, frames in ((MediaLimits(), [1]), (MediaLimits(max_pixels=26_000_000), [1, 2])):
        # The socket to an isolated model takes 64 MiB.
        config = make_config(tmp_path, media=media, models={"cells": ModelOptions(isolated=False)})
        with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
            lines = list(read_lines(service, {"model": "cells", "source": str(tmp_path)}))
        assert [line["frame"] for line in answers(iter(lines))] == frames
        end = next(line for line in reversed(lines) if "state" in line)
        stated = (end["state"], f"{tmp_path}/2.jpg" in end.get("error", ""))
        assert stated == (("ended", False) if len(frames) == 2 else ("failed", True)), end


def test_folder_that_is_shown_slowly_is_not_taken_for_one_that_stalls(cells: Running, tmp_path: Path) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    for number, picture in enumerate(draw_cells(3)):
        (tmp_path / f"{number}.png").write_bytes(encode(picture))
    order = {"model": "cells", "source": str(tmp_path), "max_fps": 0.4, "stall_s": 1.0, "open_s": 60}
    lines = list(read_lines(cells, order))
    assert [line["frame"] for line in answers(iter(lines))] == [1, 2, 3]
    assert [line["state"] for line in lines if "state" in line] == ["opening", "running", "ended"]


def test_stream_ends_with_the_client_that_started_it(cells: Running, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(8))
    order = {"model": "cells", "source": str(video), "repeat": True, "name": "short"}
    with contextlib.closing(read_lines(cells, order)) as lines:
        next(answers(lines))
        (entry,) = list_streams(cells)
        assert (entry["name"], entry["state"], entry["model"]) == ("short", "running", "cells")
        assert entry["frames"]["read"] >= entry["frames"]["answered"] >= 1
        assert {"prepare", "total"} <= set(entry["times_ms"])
        bounds = {resource.RLIMIT_DATA: 1 << 30, resource.RLIMIT_FSIZE: 1 << 18}  # memory, and its messages
        assert {kind: resource.prlimit(entry["capture_pid"], kind)[0] for kind in bounds} == bounds
        page = ask(cells, get_bytes("/metrics")).body.decode()
        assert 'edgekit_stream_up{stream="short",model="cells"} 1.0' in page
    wait_for(lambda: not list_streams(cells), "the end of the stream")
    wait_for(lambda: not is_running(entry["capture_pid"]), "the end of its process")


def test_stream_follows_a_swap_of_its_model(maker: PackageMaker, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(8))
    packages = tmp_path / "packages"
    packages.mkdir()
    write_cell_detector(maker, packages / "cells-1.edgepkg")
    with running(make_config(tmp_path), PackageFiles([packages], maker.trust)) as service:
        order = {"model": "cells", "source": str(video), "repeat": True}
        lines = answers(read_lines(service, order))
        assert next(lines)["model_version"] == "1.0.0"
        write_cell_detector(maker, packages / "cells-2.edgepkg", version="2.0.0")
        assert load(service, "cells").status == 200
        assert "2.0.0" in (line["model_version"] for line in lines)
        lines.close()


def test_isolated_model_answers_a_stream(maker: PackageMaker, folder_of_cells: Path, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(4))
    config = make_config(tmp_path, models={"cells": ModelOptions(isolated=True)})
    with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
        order = {"model": "cells", "source": str(video), "all_frames": True}
        assert [line["detections"][0]["box"][0] for line in answers(read_lines(service, order))] == [
            0,
            32,
            64,
            96,
        ]


def test_file_with_frames_beyond_the_limit_fails_before_they_are_decoded(
    cells: Running, tmp_path: Path
) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(2), codec="I420")
    data = bytearray(video.read_bytes())
    at = data.index(b"strf") + 12  # the size in BITMAPINFOHEADER
    for side, reason in ((9_000, "pixels"), (60_000, "no size")):  # 240 MB and 11 GB
        data[at : at + 8] = side.to_bytes(4, "little") * 2
        video.write_bytes(data)
        lines = list(read_lines(cells, {"model": "cells", "source": str(video)}))
        assert (lines[-1]["state"], reason in lines[-1]["error"]) == ("failed", True), lines[-1]


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"RIFF\xff\xff\xff\xffAVI LIST"])
def test_file_that_is_no_video_fails_with_a_reason(cells: Running, tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    (tmp_path / "v.mp4").write_bytes(content)
    lines = list(read_lines(cells, {"model": "cells", "source": str(tmp_path / "v.mp4")}))
    assert (lines[-1]["state"], "cannot be opened" in lines[-1]["error"]) == ("failed", True)


def test_pipeline_without_gstreamer_says_what_is_missing(cells: Running) -> None:
    cv2 = pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    if cv2.videoio_registry.hasBackend(cv2.CAP_GSTREAMER):
        pytest.skip("this OpenCV has GStreamer")
    lines = list(read_lines(cells, {"model": "cells", "source": "gstreamer:videotestsrc ! appsink"}))
    assert (lines[-1]["state"], "GStreamer" in lines[-1]["error"]) == ("failed", True)


def write_wav(path: Path, seconds: float, rate: int = 8000) -> Path:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(np.zeros(round(seconds * rate), "<i2").tobytes())
    return path


def test_sound_goes_to_a_model_of_pictures_only_with_an_error(cells: Running, tmp_path: Path) -> None:
    """It needs no OpenCV."""
    source = write_wav(tmp_path / "s.wav", 1.2)
    lines = list(read_lines(cells, {"model": "cells", "source": str(source)}))
    assert lines[-1]["state"] == "ended"
    assert "takes a picture" in lines[-1]["error"]


# Who may do what


def test_order_that_cannot_be_is_refused_with_its_reason(cells: Running) -> None:
    for order, reason in (
        ({"model": "cells"}, "'source' is missing"),
        ({"model": "cells", "source": "gopher://x"}, "expected one of"),
        ({"model": "cells", "source": "0", "sinks": ["ftp://x"]}, "sink"),
        ({"model": "cells", "source": "0", "evry": 2}, "unknown setting 'evry'"),
        ({"model": "cells", "source": "0", "name": 7}, "name"),
        ({"model": "cells", "source": "0", "every": 0}, "every"),
    ):
        reply = ask(cells, post_bytes("/v2/streams", json.dumps(order).encode()))
        assert (reply.status, reason in reply.json["error"]) == (400, True), reply.json
    reply = ask(cells, post_bytes("/v2/streams", b'{"model": "cell", "source": "0"}'))
    assert (reply.status, "'cell' is unknown" in reply.json["error"]) == (404, True), reply.json
    assert list_streams(cells) == []


def test_viewers_do_not_keep_the_owner_from_a_stream(cells: Running, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(4))
    order = {"model": "cells", "source": str(video), "repeat": True, "name": "seen"}
    with contextlib.ExitStack() as stack:
        next(answers(stack.enter_context(contextlib.closing(read_lines(cells, order)))))
        for status in (200, 200, 200, 503):  # max_viewers is 3
            client = stack.enter_context(cells.connect_tcp())
            client.sendall(get_bytes("/v2/streams/seen/answers"))
            assert client.recv(12) == f"HTTP/1.1 {status}".encode()
        more = read_lines(cells, {**order, "name": "more"})
        next(answers(stack.enter_context(contextlib.closing(more))))


def test_streams_are_not_started_over_tcp(cells: Running) -> None:
    body = json.dumps({"model": "cells", "source": "0", "sinks": ["file:/tmp/x"]}).encode()
    with cells.connect_tcp() as client:
        client.sendall(post_bytes("/v2/streams", body))
        assert Replies(client).next().status == 403


def test_streams_are_not_started_over_tls(
    maker: PackageMaker, folder_of_cells: Path, tmp_path: Path, certificate: tuple[Path, Path]
) -> None:
    """The service decrypts on a socket pair of its own user."""
    listen = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
    packages = PackageFiles([folder_of_cells / "packages"], maker.trust)
    body = json.dumps({"model": "cells", "source": str(tmp_path), "sinks": ["file:/tmp/x"]}).encode()
    with (
        running(make_config(tmp_path, listen=listen), packages) as service,
        ssl.create_default_context(cafile=certificate[0]).wrap_socket(
            service.connect_tcp(), server_hostname="127.0.0.1"
        ) as client,
    ):
        client.sendall(post_bytes("/v2/streams", body))
        assert Replies(client).next().status == 403


def test_paths_of_no_stream_are_not_found(cells: Running) -> None:
    for path in ("/live/none.mjpeg", "/v2/streams/none/answers", "/live/x", "/v2/streams/a/b/c"):
        assert ask(cells, get_bytes(path)).status == 404
    assert ask(cells, post_bytes("/live", b"")).status == 405


def test_web_page_elsewhere_cannot_show_the_pictures(cells: Running, tmp_path: Path) -> None:
    write_video(tmp_path / "yard.avi", draw_cells(8))
    lines = read_lines(cells, {"model": "cells", "source": str(tmp_path / "yard.avi"), "repeat": True})
    name = next(lines)["stream"]
    with cells.connect_tcp() as client, client.makefile("rb") as response:
        client.sendall(get_bytes(f"/live/{name}.mjpeg"))
        head = [response.readline() for _ in range(5)]
    assert b"Cross-Origin-Resource-Policy: same-origin\r\n" in head
    lines.close()


def test_live_page_runs_its_own_script_alone(cells: Running) -> None:
    reply = ask(cells, get_bytes("/live"))
    assert (reply.status, reply.fields["content-type"]) == (200, "text/html; charset=utf-8")
    policy = reply.fields["content-security-policy"]
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "unsafe" not in policy


def test_web_page_elsewhere_reaches_no_stream(cells: Running) -> None:
    for path in ("/v2/streams", "/live", "/live/yard.mjpeg"):
        with cells.connect_tcp() as client:
            client.sendall(get_bytes(path, fields="Origin: http://example.org\r\n"))
            assert Replies(client).next().status == 403


def test_picture_in_a_web_page_elsewhere_is_refused(cells: Running) -> None:
    for site, kind, status in (
        ("cross-site", "image", 403),
        ("same-site", "image", 403),
        ("cross-site", "iframe", 403),
        ("cross-site", "document", 200),  # a link that is opened
        ("same-origin", "empty", 200),
        ("none", "document", 200),
    ):
        fields = f"Sec-Fetch-Site: {site}\r\nSec-Fetch-Dest: {kind}\r\n"
        for path in ("/v2/streams", "/live"):
            with cells.connect_tcp() as client:
                client.sendall(get_bytes(path, fields=fields))
                assert Replies(client).next().status == status


def test_browser_sends_the_token_as_a_password(
    maker: PackageMaker, folder_of_cells: Path, tmp_path: Path, token_file: Path
) -> None:
    config = make_config(tmp_path, listen={"token_file": str(token_file)})
    login = base64.b64encode(f"me:{TOKEN}".encode()).decode()
    with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
        for path, fields, status, scheme in (
            ("/live", "", 401, "Basic"),
            ("/v2/streams", "", 401, "Bearer"),
            ("/live", f"Authorization: Basic {login}\r\n", 200, ""),
            ("/v2/streams", f"Authorization: Basic {login}\r\n", 200, ""),
            ("/live", "Authorization: Basic ?\r\n", 401, "Basic"),
            ("/live", f"Authorization: Basic {base64.b64encode(TOKEN.encode()).decode()}\r\n", 401, "Basic"),
        ):
            with service.connect_tcp() as client:
                client.sendall(get_bytes(path, fields=fields))
                reply = Replies(client).next()
            assert (reply.status, reply.fields.get("www-authenticate", "").split(" ")[0]) == (status, scheme)
        with service.connect_tcp() as client:  # a browser adds it to what other pages send, too
            client.sendall(post_bytes("/v2/repository/index", b"", f"Authorization: Basic {login}\r\n"))
            assert Replies(client).next().status == 401


@pytest.mark.parametrize(("host", "status"), [("0.0.0.0", 404), ("127.0.0.1", 200)])  # noqa: S104
def test_live_page_is_off_where_other_machines_reach_the_service(
    maker: PackageMaker,
    folder_of_cells: Path,
    tmp_path: Path,
    token_file: Path,
    certificate: tuple[Path, Path],
    host: str,
    status: int,
) -> None:
    tls = {"tls_certificate": str(certificate[0]), "tls_key": str(certificate[1])}
    config = make_config(tmp_path, listen={"host": host, "token_file": str(token_file), **tls})
    with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
        assert ask(service, get_bytes("/live")).status == status
        pictures = ask(service, get_bytes("/live/none.mjpeg"))
        assert (pictures.status, b"stream 'none'" in pictures.body) == (404, status == 200)


def test_live_page_can_be_switched_off(maker: PackageMaker, folder_of_cells: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path, live=LiveOptions(enabled=False))
    with running(config, PackageFiles([folder_of_cells / "packages"], maker.trust)) as service:
        assert ask(service, get_bytes("/live")).status == 404
        assert ask(service, get_bytes("/v2/streams")).json == {"streams": []}


# The command, and the configuration


@pytest.fixture
def home(maker: PackageMaker, folder: Path) -> Path:
    """A folder for `serve`, with the detector in place of the package that tests serve."""
    write_cell_detector(maker, folder / "linear.edgepkg")
    return folder


@pytest.fixture(scope="module")
def process(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service in a process of its own."""
    folder = tmp_path_factory.mktemp("home")
    write_cell_detector(maker, folder / "linear.edgepkg")
    write_keys(folder / "keys")
    with served(folder, limit_s=SHARED_S) as service:
        yield service


def test_command_prints_answers_and_counts_them(
    process: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(6))
    where = ["--socket", str(process.socket_path), "--model", "cells"]
    assert main(["stream", *where, "--source", str(video), "--all-frames", "--min-score", "0.5"]) == 0
    *lines, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["frame"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert last["answers"] == 6
    assert main(["stream", *where, "--source", str(tmp_path / "none.mp4")]) != 0
    assert "there is no file" in capsys.readouterr().err
    assert main(["stream", "--socket", str(process.socket_path), "--model", "cell", "--source", "0"]) != 0
    assert "'cell' is unknown" in capsys.readouterr().err


def test_command_counts_what_each_sink_got(
    process: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    video, sink = write_video(tmp_path / "v.avi", draw_cells(6)), tmp_path / "answers.jsonl"
    where = ["--socket", str(process.socket_path), "--model", "cells", "--source", str(video)]
    sinks = ["--sink", "mqtt://127.0.0.1:1/x", "--sink", f"file:{sink}"]
    for more, least in ((["--all-frames"], 6), (["--repeat", "--seconds", "2"], 1)):
        assert main(["stream", *where, *sinks, *more]) == 0
        last = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert last["answers"] >= least
        for sink_end, is_lost in zip(last["sinks"], (True, False), strict=True):
            assert (sink_end["written"] == 0) is is_lost
            assert sink_end["written"] + sink_end["waiting"] + sink_end["dropped"] >= last["answers"]
        if least == 6:
            assert len(sink.read_text().splitlines()) == 6


def test_command_ends_quietly_when_nobody_reads(process: Served, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(6))
    where = ["--socket", str(process.socket_path), "--model", "cells", "--source", str(video)]
    command = subprocess.Popen(
        [sys.executable, "-m", "edgekit_runtime.cli", "stream", *where, "--repeat"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
    )
    with bounded(command):
        assert command.stdout is not None
        assert command.stderr is not None
        line = command.stdout.readline()
        assert line, command.stderr.read()
        command.stdout.close()
        errors = command.stderr.read()
        assert (command.wait(60), "Traceback" in errors, "Broken" in errors) == (0, False, False)


def test_command_without_a_service_says_how_to_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if Path("/run/edgekit/edgekit.sock").exists():
        pytest.skip("a service runs here")
    assert main(["stream", "--model", "m", "--source", "0"]) != 0
    assert "edgekit-device serve" in capsys.readouterr().err


def test_streams_of_the_configuration_run_with_the_service(home: Path) -> None:
    source, sink = write_wav(home / "s.wav", 2), home / "answers.jsonl"
    config = home / "service.toml"
    config.write_text(
        f'[streams.door]\nmodel = "cells"\nsource = "{source}"\nrepeat = true\nsinks = ["file:{sink}"]\n'
    )
    service = Served(home, "--config", str(config))
    with bounded(service.process):
        service.wait_ready()

        def read() -> dict[str, Any]:
            with service.connect() as client:
                client.sendall(get_bytes("/v2/streams"))
                (entry,) = Replies(client).next().json["streams"]
            return dict(entry)

        entry = wait_for(lambda: (found := read())["frames"]["failed"] > 2 and found, "answers")
        assert (entry["name"], entry["state"]) == ("door", "running")
        code, output = service.end()
        assert code == 0, output
        assert not is_running(entry["capture_pid"])


@pytest.mark.parametrize(
    "text",
    ['source = "gopher://x"', pytest.param('source = "0"\nsinks = ["ftp://x"]', marks=pytest.mark.long)],
)
def test_configuration_of_a_stream_that_cannot_be_ends_the_service(home: Path, text: str) -> None:
    config = home / "service.toml"
    config.write_text(f'[streams.door]\nmodel = "cells"\n{text}\n')
    code, output = Served(home, "--config", str(config)).end_by_itself()
    assert code == ConfigError.exit_code
    assert "streams.door" in output


def test_table_of_a_stream_is_read(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text('[streams.door]\nmodel = "m"\nsource = "0"\nmax_fps = 5\n[live]\nmax_viewers = 2\n')
    config = read_config(path)
    assert config.streams["door"] == StreamOptions(model="m", source="0", max_fps=5)
    assert config.live.max_viewers == 2


# Cameras in a network


@contextlib.contextmanager
def liar(port: int, response: bytes | None) -> Iterator[None]:
    """Accept clients, and send them what is no video, or nothing."""
    clients: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                clients.append(client)
                if response is not None:
                    client.sendall(response)
                    client.close()

    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)
    for client in clients:
        client.close()


class Files(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    "response",
    [
        None,
        b"",
        b"\0\xff" * 5000,
        b"HTTP/1.1 200 OK\r\nContent-Type: video/avi\r\nContent-Length: 11000000000\r\n\r\nRIFF"
        + b"\xff" * 500,
    ],
)
def test_camera_in_the_network_that_lies_is_read_once_it_is_honest(
    cells: Running, tmp_path: Path, response: bytes | None
) -> None:
    write_video(tmp_path / "v.avi", draw_cells(3))
    port = free_port()
    order = {"model": "cells", "source": f"http://127.0.0.1:{port}/v.avi", "open_s": 1.5, "stall_s": 1}
    with contextlib.closing(read_lines(cells, order)) as lines:
        with liar(port, response):
            error = next(line["error"] for line in lines if line.get("state") == "waiting")
            assert "cannot be opened" in error or "no frame" in error
        handler = functools.partial(Files, directory=tmp_path)
        with http.server.ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
            server.daemon_threads = True
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            assert next(answers(lines))["detections"]
            server.shutdown()
            thread.join()


def test_rtsp_server_that_lies_costs_attempts_only(cells: Running) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    port = free_port()
    order = {
        "model": "cells",
        "source": f"rtsp://me:secret@127.0.0.1:{port}/1",
        "open_s": 1.5,
        "name": "door",
    }
    sdp = b"v=0\r\nm=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=framesize:96 99999-99999\r\n"
    head = (
        b"RTSP/1.0 200 OK\r\nCSeq: 1\r\nContent-Type: application/sdp\r\nContent-Length: 99999999999\r\n\r\n"
    )
    with contextlib.closing(read_lines(cells, order)) as lines, liar(port, head + sdp):
        assert "secret" not in next(line["error"] for line in lines if line.get("state") == "waiting")
        wait_for(lambda: list_streams(cells)[0]["restarts"] >= 2, "another attempt")
        assert "secret" not in json.dumps(list_streams(cells))


def test_killed_decoder_comes_back(cells: Running, tmp_path: Path) -> None:
    video = write_video(tmp_path / "v.avi", draw_cells(8))
    order = {"model": "cells", "source": str(video), "repeat": True}
    with contextlib.closing(read_lines(cells, order)) as lines:
        next(answers(lines))
        os.kill(list_streams(cells)[0]["capture_pid"], signal.SIGKILL)
        assert "SIGKILL" in next(line["error"] for line in lines if line.get("state") == "waiting")
        next(answers(lines))


def test_rtsp_camera_that_vanishes_is_read_again(cells: Running) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    from tests.service.rtsp_server import RtspServer

    port = free_port()
    order = {"model": "cells", "source": f"rtsp://me:secret@127.0.0.1:{port}/yard", "min_score": 0.5}
    with contextlib.closing(read_lines(cells, order)) as lines:
        for _ in range(2):
            camera = RtspServer(port, draw_cells(8))
            try:
                columns = {next(answers(lines))["detections"][0]["box"][0] // 16 * 16 for _ in range(30)}
            finally:
                camera.close()
            assert columns <= {0, 16, 32, 48, 64, 80, 96}
            assert len(columns) >= 2
            assert next(line["state"] for line in lines if line.get("error")) == "waiting"


@pytest.mark.parametrize("fault", ["silent", "garbage", "hangs", "other size"])
def test_rtsp_camera_with_a_fault_is_read_again_and_the_service_goes_on(cells: Running, fault: str) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    from tests.service.rtsp_server import RtspServer

    port = free_port()
    camera = RtspServer(port, draw_cells(8))
    order = {"model": "cells", "source": f"rtsp://127.0.0.1:{port}/yard"}
    try:
        with contextlib.closing(read_lines(cells, order)) as lines:
            for _ in range(10):
                assert next(answers(lines))["width"] == 128
            if fault == "other size":
                camera.show([draw(256, 256, red=(0, 0))])
                assert any(answer["height"] == 256 for answer in answers(lines))
                return
            camera.spoil(bytes(range(256)) if fault == "garbage" else b"")
            camera.hangs = fault == "hangs"
            if fault != "garbage":
                assert "no frame" in next(line["error"] for line in lines if line.get("state") == "waiting")
            camera.hangs = False
            begin = time.time()
            assert any(answer["captured_at"] > begin for answer in answers(lines))
    finally:
        camera.close()
    assert ask(cells, get_bytes("/v2/health/ready")).status == 200


@pytest.mark.parametrize("dtype", ["int16", "int32", "float32"])
def test_recording_becomes_events_in_windows(maker: PackageMaker, tmp_path: Path, dtype: str) -> None:
    """Sound needs no OpenCV."""
    write_level_meter(maker, tmp_path / "meter.edgepkg", SECOND)
    sound = np.zeros(2 * RATE, np.float32)
    sound[RATE : RATE + RATE // 5] = 0.9
    (tmp_path / "s.wav").write_bytes(make_wav(code(sound, dtype)))
    with running(make_config(tmp_path), PackageFiles([tmp_path / "meter.edgepkg"], maker.trust)) as service:
        order = {"model": "meter", "source": str(tmp_path / "s.wav"), "hop_s": 0.5}
        records = list(answers(read_lines(service, order)))
    assert [record["rate"] for record in records] == [RATE] * 4
    begins = [[round(event["begin_s"], 1) for event in record["events"]] for record in records]
    assert begins == [[], [], [0.5], [0.0]]  # windows end at 0.5, 1, 1.5 and 2 s


MICROPHONE = """
import numpy


class InputStream:
    def __init__(self, *, device, samplerate, channels, dtype):
        assert (device, samplerate, channels, dtype) == ("USB", 16000, 1, "float32")
        self.count = 0

    def start(self):
        pass

    def read(self, count):
        self.count += 1
        return numpy.full((count, 1), 0.9 * (self.count % 2), numpy.float32), False
"""


def test_microphone_is_heard_in_windows(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "sounddevice.py").write_text(MICROPHONE)
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    write_level_meter(maker, tmp_path / "meter.edgepkg", SECOND)
    with running(make_config(tmp_path), PackageFiles([tmp_path / "meter.edgepkg"], maker.trust)) as service:
        lines = read_lines(service, {"model": "meter", "source": "microphone:USB", "hop_s": 0.5})
        with contextlib.closing(lines):
            record = next(answers(lines))
            assert record["rate"] == RATE
            assert record["events"][0]["end_s"] - record["events"][0]["begin_s"] == pytest.approx(0.5)


def test_camera_that_is_not_there_is_tried_again(cells: Running) -> None:
    pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    with contextlib.closing(read_lines(cells, {"model": "cells", "source": "/dev/video99"})) as lines:
        waiting = next(line for line in lines if line.get("state") == "waiting")
        assert waiting["error"] == "/dev/video99 cannot be opened"
        wait_for(lambda: list_streams(cells)[0]["restarts"] >= 2, "another attempt")
