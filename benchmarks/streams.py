"""A stream of 30 frames a second: late frames, processor time and memory.

    scripts/python benchmarks/streams.py [--seconds 120] [--model-ms 10] [--faults 3]

A video of 640 x 480 in Motion JPEG plays at 30 frames a second, again and again, into a model of about so
many milliseconds on one thread; the answers go to a file. A frame is late if its answer comes more than one
interval (33 ms) after its capture, or never. The processor time of service and capture process for each frame
is compared with that of a plain loop at the same rate, before and after: decoding and conversion to RGB, the
preprocessing, the model, the answer of its task. Memory is the PSS of both processes. Late frames, processor
time and memory are also stated for each minute. Needs the extra `stream`.

At the end a camera (an RTSP server here) has each of `FAULTS` a few times, 4 s apart. The time counts from
the fault to the answer to a frame that was captured after it; for `hangs 8 s`, in which the camera answers
nobody, from the end of the fault.
"""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from tests.free_port import free_port
from tests.service.rtsp_server import RtspServer

from edgekit_runtime.client.control import read_stream
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tasks.answerer import open_answerer
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import load_signer
from graphs import GraphBuilder
from processes import list_children, read_cpu_s, read_memory
from results import machine, make_parser, print_table, write_json
from serving import serving, write_signed

FPS, WIDTH, HEIGHT, SIDE, BOXES, CLASSES = 30, 640, 480, 224, 100, 80
FAULTS = ("is killed", "goes silent", "sends garbage", "changes size", "hangs 8 s")
_WARM_S = 5.0
_PROVEN_S = 4.0  # of answers before each fault
_HANGS_S = 8.0
_BUFFERED_S = 0.5  # a decoder may have frames from before the fault


def make_model(layers: int) -> bytes:
    """Return a detector of random weights with `layers` convolutions."""
    build, draws = GraphBuilder(), np.random.default_rng(0)

    def draw(deviation: float, *shape: int) -> str:
        return build.weight(draws.normal(0, deviation, shape).astype(np.float32))

    first, last = draw(0.05, 16, 3, 3, 3), draw(0.01, 16, BOXES * (4 + CLASSES))
    x = build.add("Conv", ["x", first], strides=[4, 4])
    for _ in range(layers):
        x = build.add("Relu", [build.add("Conv", [x, draw(0.08, 16, 16, 3, 3)], pads=[1, 1, 1, 1])])
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x])])
    shares = build.add("Sigmoid", [build.add("MatMul", [x, last])])
    boxes = build.add("Reshape", [shares, build.weight(np.array([0, 4 + CLASSES, BOXES]))])
    model = build.model({"x": [1, 3, SIDE, SIDE]}, {boxes: [1, 4 + CLASSES, BOXES]})
    return model.SerializeToString()


def find_layers(model_ms: float) -> bytes:
    """Return a model that takes about `model_ms` on one thread here."""
    feed = {"x": np.zeros((1, 3, SIDE, SIDE), np.float32)}
    session = OrtSession(make_model(8), OrtOptions(threads=1))
    layer_ms = measure_ms(lambda: session.run(feed)) / 8
    return make_model(max(1, round(model_ms / layer_ms)))


def measure_ms(act: Callable[[], object], count: int = 60) -> float:
    """Return the processor time of one call."""
    act()
    begin_s = time.process_time()
    for _ in range(count):
        act()
    return 1000 * (time.process_time() - begin_s) / count


def write_video(path: Path) -> None:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), FPS, (WIDTH, HEIGHT))
    texture = np.random.default_rng(0).integers(0, 60, (HEIGHT, WIDTH, 3), np.uint8)
    rows, columns = np.mgrid[:HEIGHT, :WIDTH]
    for number in range(10 * FPS):
        ramps = [(columns + 4 * number) % 256, (rows + 2 * number) % 256, (columns + rows) % 256]
        writer.write((np.stack(ramps, axis=-1) // 2 + texture).astype(np.uint8))
    writer.release()


def measure_parts(video: Path, package: Path, trust: TrustStore, seconds: float) -> dict[str, float]:
    """Return the processor time of each step of a frame in a plain loop at the same rate, in milliseconds."""
    cv2.setNumThreads(1)
    capture = cv2.VideoCapture(str(video), cv2.CAP_FFMPEG)
    room = np.empty((HEIGHT, WIDTH, 3), np.uint8)
    with read_package(package, trust) as opened:
        answerer = open_answerer(opened)
        session = OrtSession(bytes(opened.read("model.onnx")), OrtOptions(threads=1))
    assert answerer is not None
    kind = MediaType.parse(f"video/x-raw; format=RGB; width={WIDTH}; height={HEIGHT}")
    spent: list[list[float]] = []
    due_s = time.monotonic()
    for _ in range(round(min(seconds, 9.0) * FPS)):
        clocks = [time.process_time()]
        cv2.cvtColor(capture.read()[1], cv2.COLOR_BGR2RGB, dst=room)
        clocks.append(time.process_time())
        prepared = answerer.prepare(room.data.cast("B"), kind, WIDTH * HEIGHT)
        clocks.append(time.process_time())
        outputs = session.run(prepared.inputs)
        clocks.append(time.process_time())
        answerer.answer(outputs, prepared.placement)
        clocks.append(time.process_time())
        spent.append(clocks)
        due_s += 1 / FPS
        time.sleep(max(0.0, due_s - time.monotonic()))
    means = 1000 * np.diff(np.array(spent[FPS:]), axis=1).mean(axis=0)
    return dict(zip(("decode", "prepare", "model", "answer"), map(float, means), strict=True))


def run_stream(path: str, video: Path, seconds: float, sink: Path, pid: int) -> dict[str, Any]:
    """Run the stream, and return what it took between its warm-up and its end."""
    samples: list[tuple[float, float, float, float]] = []  # time, processor time of both, memory
    is_over = threading.Event()

    def watch() -> None:
        is_over.wait(_WARM_S)
        while not is_over.is_set():
            with contextlib.suppress(OSError, LookupError):  # the stream ends just now
                service_s, capture = read_cpu_s(pid), list_children(pid)[-1]
                memory_mb = sum(read_memory(process)["Pss"] for process in (pid, capture)) / 1e6
                samples.append((time.time(), service_s, read_cpu_s(capture), memory_mb))
            is_over.wait(2.0)

    order = {"model": "detector", "source": str(video), "repeat": True, "seconds": seconds + _WARM_S}
    order["sinks"] = [f"file:{sink}"]
    watcher = threading.Thread(target=watch)
    watcher.start()
    lines = list(read_stream(Path(path), order))
    is_over.set()
    watcher.join()
    records = [record for record in map(json.loads, lines) if "frame" in record]
    records = records[round(_WARM_S * FPS) :]
    totals = np.array([record["times_ms"]["total"] for record in records])
    frames = records[-1]["frame"] - records[0]["frame"] + 1
    elapsed_s, service_s, capture_s, _ = np.subtract(samples[-1], samples[0])
    return {
        "frames": frames,
        "late": int((totals > 1000 / FPS).sum()) + frames - len(records),
        "never": frames - len(records),
        "minutes": list_minutes(records, np.array(samples)),
        "p50_ms": float(np.median(totals)),
        "p99_ms": float(np.quantile(totals, 0.99)),
        "service_cpu_ms": float(1000 * service_s / (FPS * elapsed_s)),
        "capture_cpu_ms": float(1000 * capture_s / (FPS * elapsed_s)),
        "memory_mb": [sample[3] for sample in samples],
    }


def list_minutes(records: list[dict[str, Any]], samples: NDArray[np.float64]) -> list[dict[str, float]]:
    """Return late frames, processor time of a frame and memory at the end, of each minute that has begun."""
    minutes = []
    for begin_s in np.arange(samples[0, 0], samples[-1, 0] - 1, 60.0):
        inside = samples[(samples[:, 0] >= begin_s) & (samples[:, 0] < begin_s + 62)]
        numbers = [record["frame"] for record in records if 0 <= record["captured_at"] - begin_s < 60]
        in_time = [
            record["times_ms"]["total"] <= 1000 / FPS
            for record in records
            if 0 <= record["captured_at"] - begin_s < 60
        ]
        elapsed_s, service_s, capture_s, _ = inside[-1] - inside[0]
        minutes.append(
            {
                "late": numbers[-1] - numbers[0] + 1 - sum(in_time),
                "cpu_ms": 1000 * (service_s + capture_s) / (FPS * elapsed_s),
                "memory_mb": inside[-1, 3],
            }
        )
    return minutes


def measure_fault(path: str, fault: str, pid: int, count: int) -> list[float]:
    """Return the seconds until answers come again, of each of `count` faults."""
    pictures = [np.full((240, 320, 3), 20 * number, np.uint8) for number in range(10)]
    port = free_port()
    camera = RtspServer(port, pictures, FPS)
    order = {"model": "detector", "source": f"rtsp://127.0.0.1:{port}/1", "seconds": 60.0 * count}
    seconds, due_s = list[float](), time.time() + _PROVEN_S
    after_s, width = 0.0, 0
    try:
        for line in read_stream(Path(path), order):
            record = json.loads(line)
            captured_at = record.get("captured_at", 0.0)
            buffered_s = _BUFFERED_S if fault in ("goes silent", "sends garbage") else 0.0
            if after_s and captured_at > after_s + buffered_s and record["width"] != width:
                seconds.append(time.time() - after_s)
                after_s, due_s = 0.0, time.time() + _PROVEN_S
            if len(seconds) == count:
                break
            if after_s or captured_at < due_s:
                continue
            after_s = time.time()
            if fault == "is killed":
                os.kill(list_children(pid)[-1], signal.SIGKILL)
            elif fault == "changes size":
                width = record["width"]
                camera.show([np.zeros((240, 960 - width, 3), np.uint8)])
            elif fault.startswith("hangs"):
                camera.spoil()
                camera.hangs = True
                after_s += _HANGS_S
                threading.Timer(_HANGS_S, setattr, (camera, "hangs", False)).start()
            else:
                camera.spoil(os.urandom(4096) if fault == "sends garbage" else b"")
    finally:
        camera.close()
    return seconds


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--model-ms", type=float, default=10.0)
    parser.add_argument("--faults", type=int, default=3, help="of each kind, at the end")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        video = folder / "video.avi"
        write_video(video)
        signer = load_signer(folder=folder / "keys")
        preprocessing = {"letterbox": [SIDE, SIDE], "scale": 1 / 255}
        package = write_signed(
            folder,
            "detector",
            find_layers(arguments.model_ms),
            {"x": np.zeros((1, 3, SIDE, SIDE), np.float32)},
            signer,
            preprocessing=preprocessing,
            task=TaskChoice("detection", {}),
        )
        trust = TrustStore.from_folder(folder / "keys")
        before = measure_parts(video, package, trust, arguments.seconds)
        with serving(folder, package) as service:
            result = run_stream(service.path, video, arguments.seconds, folder / "a.jsonl", service.pid)
            result["returns_s"] = {
                fault: measure_fault(service.path, fault, service.pid, arguments.faults)
                for fault in FAULTS * bool(arguments.faults)
            }
        after = measure_parts(video, package, trust, arguments.seconds)
    parts = {part: (before[part] + after[part]) / 2 for part in before}
    memory = np.array(result["memory_mb"])
    slope_mb = float(np.polyfit(np.arange(len(memory)) * 2.0, memory, 1)[0] * 600) if len(memory) > 2 else 0.0
    whole_ms, sum_ms = result["service_cpu_ms"] + result["capture_cpu_ms"], sum(parts.values())
    print_table(
        ("figure", "value"),
        [
            ("frames", result["frames"]),
            (
                "late by more than one interval, of them never answered",
                f"{result['late']}, {result['never']}",
            ),
            ("from capture to answer, p50 and p99, ms", f"{result['p50_ms']:.1f}, {result['p99_ms']:.1f}"),
            *((f"{part} in a plain loop, ms of processor", round(value, 2)) for part, value in parts.items()),
            ("service for a frame, ms of processor", round(result["service_cpu_ms"], 2)),
            ("capture process for a frame, ms of processor", round(result["capture_cpu_ms"], 2)),
            ("over the plain loop", f"{whole_ms / sum_ms - 1:+.0%}"),
            *(
                (f"back after the camera {fault}, s", ", ".join(f"{value:.1f}" for value in values))
                for fault, values in result["returns_s"].items()
            ),
            ("memory at the begin and the end, MB of PSS", f"{memory[0]:.1f}, {memory[-1]:.1f}"),
            ("growth in 10 minutes by a line through all samples, MB", round(slope_mb, 1)),
        ],
    )
    print_table(
        ("minute", "late frames", "processor of a frame, ms", "memory, MB of PSS"),
        [
            (number, minute["late"], round(minute["cpu_ms"], 2), round(minute["memory_mb"], 1))
            for number, minute in enumerate(result["minutes"], 1)
        ],
    )
    write_json(arguments.json, {"machine": machine(), "parts": parts, **result})


if __name__ == "__main__":
    main()
