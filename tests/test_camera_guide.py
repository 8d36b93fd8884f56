"""The commands of docs/guide/camera.md, as a newcomer runs them: from a detector to boxes on /live."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from tests.fork_server import runtime_server
from tests.service.answer_parts import LABELS, draw, make_cell_detector
from tests.service.stream_parts import write_video

ROOT = Path(__file__).resolve().parents[1]
DEVICE = [sys.executable, "-m", "edgekit_runtime.cli"]
PROGRAMS = {
    "./edgekit": [sys.executable, "-m", "edgekit_cli"],
    "env/bin/edgekit-device": DEVICE,
    "echo": ["echo"],
}
SHORT = {"package": ["--search-seconds", "0", "--backend", "ort"], "serve": ["--port", "0"]}


def read_commands() -> list[str]:
    """Return the commands of the sections up to where the answers are sent somewhere else."""
    text = (ROOT / "docs" / "guide" / "camera.md").read_text(encoding="utf-8")
    blocks = re.findall(
        r"^```sh\n(.*?)^```", text.partition("## Send the answers")[0], re.DOTALL | re.MULTILINE
    )
    return [line for block in blocks for line in block.splitlines()]


def turn(picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(picture[:, :, ::-1])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the guide says that one needs: a detector of two colours, and a video of them.

    The guide's detector takes BGR, so what this one calls red is blue in pictures.
    """
    (tmp_path / "detector.onnx").write_bytes(make_cell_detector())
    (tmp_path / "coco.txt").write_bytes(LABELS)
    (tmp_path / "photos").mkdir()
    draws = np.random.default_rng(0)
    for number in range(24):
        red, green = draws.permutation(16)[:2]
        picture = draw(64, 64, red=(int(red) % 4, int(red) // 4), green=(int(green) % 4, int(green) // 4))
        Image.fromarray(turn(picture)).save(tmp_path / "photos" / f"{number}.png")
    write_video(tmp_path / "yard.mp4", [turn(draw(128, 128, red=(1, 1)))] * 20, codec="mp4v")
    return tmp_path


def start(command: list[str], folder: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Start a command of the guide; those of a device are copies of a process."""
    is_device = command[: len(DEVICE)] == DEVICE
    return (runtime_server().popen if is_device else subprocess.Popen)(
        command,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT / "device_runtime")} if is_device else environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(command: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Return what a command prints."""
    process = start(command, folder, environment)
    output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    return output


@contextmanager
def serving(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[int]:
    """Run the service; yield its port once it is ready."""
    process = start(command, folder, environment)
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if "ready at" in line:
                break
        else:
            pytest.fail("".join(lines))
        yield int(line.rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 0


def test_newcomer_sees_boxes(folder: Path) -> None:
    folders = ("device_runtime", "host", "toolkit", "offload", "fleet", "hil")
    environment = {
        **os.environ,
        "EDGEKIT_HOME": str(folder / "home"),
        "XDG_RUNTIME_DIR": str(folder),  # of the socket
        "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in folders),
    }
    environment.pop("RUNTIME_DIRECTORY", None)
    words = [shlex.split(line.replace("416", "64"), comments=True) for line in read_commands()]
    commands = [
        [*PROGRAMS[first], *rest, *SHORT.get((rest or [""])[0], [])]
        for first, *rest in words
        if first in PROGRAMS
    ]
    preprocessing, package, export, trust, serve, stream = commands
    (folder / "letterbox.json").write_text(preprocessing[1])
    for command in (package, export, trust):
        run(command, folder, environment)
    with serving(serve, folder, environment) as port:
        printed = run(stream, folder, environment)
        answers = [json.loads(line) for line in printed.splitlines() if "detections" in line]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=60) as page:
            assert b"<canvas" in page.read()
    assert answers
    (detection,) = answers[-1]["detections"]
    assert detection["label"] == "red"
    assert np.allclose(detection["box"], [32, 32, 64, 64], atol=1)
