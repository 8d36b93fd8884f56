"""Streams of tests: a model that answers when it is told to, and videos of coloured cells."""

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import draw
from tests.service.service_parts import Manifest_, Running, write_signed

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.service.streams.stream import FrameCall

Reply = Callable[[Any], None]


class ManualModel:
    """Notes what is submitted; the test replies."""

    def __init__(self) -> None:
        self.submitted: asyncio.Queue[tuple[NDArray[Any], Reply]] = asyncio.Queue()
        self.refusal: EdgekitError | None = None
        self.trial: str | None = None
        self.calls: list[FrameCall] = []

    def has_states(self, _model: str) -> bool:
        return False

    def find_trial(self, _model: str) -> str | None:
        return self.trial

    def submit(self, call: FrameCall) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.calls.append(call)
        self.submitted.put_nowait((call.array, call.reply))

    async def next(self) -> tuple[NDArray[Any], Reply]:
        return await asyncio.wait_for(self.submitted.get(), 60)

    def close(self) -> None:
        pass


def write_video(path: Path, pictures: Sequence[NDArray[Any]], *, codec: str = "MJPG") -> Path:
    """Write a video of pictures in RGB; skip the test without OpenCV."""
    cv2 = pytest.importorskip("cv2", reason="needs the extra: pip install 'edgekit[stream]'")
    height, width = pictures[0].shape[:2]
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*codec), 30.0, (width, height))
    for picture in pictures:
        writer.write(cv2.cvtColor(picture, cv2.COLOR_RGB2BGR))
    writer.release()
    return path


def draw_cells(count: int) -> list[NDArray[Any]]:
    """Return pictures of 128 x 128, with a red cell that moves from column to column."""
    return [draw(128, 128, red=(number % 4, 0)) for number in range(count)]


def write_loudness(
    maker: PackageMaker, path: Path, *, version: str = "1.0.0", first: float = 0.0, name: str = "loudness"
) -> None:
    """Write a model with a state: the sum of the mean loudness of each window, `first` + what came before.

    A window has 100 samples of 1 kHz.
    """
    helper, kind = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [
            helper.make_node("Abs", ["sound"], ["loud"]),
            helper.make_node("ReduceMean", ["loud"], ["mean"], axes=[1], keepdims=1),
            helper.make_node("Add", ["total", "mean"], ["total_out"]),
            helper.make_node("Add", ["total_out", "first"], ["sum"]),
        ],
        "loudness",
        [
            helper.make_tensor_value_info("sound", kind, ["N", 100]),
            helper.make_tensor_value_info("total", kind, ["N", 1]),
        ],
        [
            helper.make_tensor_value_info("sum", kind, ["N", 1]),
            helper.make_tensor_value_info("total_out", kind, ["N", 1]),
        ],
        [onnx.numpy_helper.from_array(np.array([first], np.float32), "first")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    golden = {"sound": np.ones((1, 100), np.float32), "total": np.ones((1, 1), np.float32)}
    total = np.full((1, 1), 2, np.float32)
    rules = {"type": "audio", "sample_rate": 1000, "samples": 100}
    write_signed(
        maker,
        path,
        Manifest_(name, version, {}, golden),
        {"sum": total + np.float32(first), "total_out": total},
        model.SerializeToString(),
        attachments={"preprocessing": encode_json(rules)},
        task=TaskChoice("regression", {}),
        states=[RecurrentState("total_out", "total")],
    )


def read_lines(service: Running, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run a stream in the service; yield its answers and states until it has ended."""
    body = json.dumps(order).encode()
    with service.connect() as client, client.makefile("rb") as lines:
        head = f"POST /v2/streams HTTP/1.1\r\nHost: l\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        status = lines.readline()
        assert b" 200 " in status, status + lines.read()
        while lines.readline().strip():
            pass
        for line in lines:
            yield json.loads(line)
