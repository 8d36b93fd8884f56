"""`edgekit-device serve` as a process of benchmarks, and the packages that it serves."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.package.archive import Sign, write_package
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Manifest
from edgekit_runtime.package.manifest_entries import BackendChoice, TaskChoice
from edgekit_runtime.package.states import RecurrentState
from edgekit_runtime.sessions.media import MediaSession
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.session import Session
from edgekit_toolkit.packaging.assemble import describe_artifacts

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "models" / "tiny"
MODEL = TINY / "digits_cnn.onnx"
INPUT, SHAPE = "image", (1, 1, 8, 8)  # of this model


@dataclass(frozen=True)
class Service:
    """A service that runs."""

    process: "subprocess.Popen[str]"
    path: str
    port: int
    ready_s: float

    @property
    def pid(self) -> int:
        return self.process.pid


@contextmanager
def serving(
    folder: Path, *packages: Path, words: tuple[str, ...] = (), python: str = sys.executable, config: str = ""
) -> Iterator[Service]:
    """Run the service with packages, or folders of them, and the keys in `folder`; yields it once ready."""
    path, began_s = f"{folder}/serve.sock", time.perf_counter()
    (folder / "service.toml").write_text(config)
    command = [python, "-m", "edgekit_runtime.cli", "serve", "--config", f"{folder}/service.toml"]
    command += [word for package in packages for word in ("--package", str(package))]
    process = subprocess.Popen(
        [*command, "--keys", f"{folder}/keys", "--unix-socket", path, "--port", "0", *words],
        env={**os.environ, "PYTHONPATH": str(ROOT / "device_runtime")},
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:  # what loads slowly lets others speak first
            lines.append(line)
            if "ready at" in line:
                break
        else:
            raise SystemExit("".join(lines))
        ready_s = time.perf_counter() - began_s
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield Service(process, path, int(line.rsplit(":", 1)[1]), ready_s)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def store_golden(
    feeds: Mapping[str, NDArray[Any]],
    outputs: Mapping[str, NDArray[Any]],
    find_atol: Callable[[NDArray[Any]], float] = lambda _: 1e-3,
) -> tuple[Golden, dict[str, bytes]]:
    """Return golden tensors, and their files by path; `find_atol` gives the tolerance of an output."""
    contents, inputs, expected = dict[str, bytes](), [], []
    for number, (name, array) in enumerate(feeds.items()):
        path = f"golden/in{number}.bin"
        contents[path] = np.ascontiguousarray(array).tobytes()
        inputs.append(GoldenInput(name, array.dtype.name, array.shape, path))
    for number, (name, array) in enumerate(outputs.items()):
        path, atol = f"golden/out{number}.bin", find_atol(array)
        contents[path] = np.ascontiguousarray(array).tobytes()
        expected.append(
            GoldenOutput(
                name=name, dtype=array.dtype.name, shape=array.shape, path=path, atol=atol, rtol=1e-3
            )
        )
    return Golden(tuple(inputs), tuple(expected)), contents


def write_signed(
    folder: Path,
    name: str,
    model: bytes,
    feeds: Mapping[str, NDArray[Any]],
    sign: Sign,
    *,
    version: str = "1.0.0",
    decode: Mapping[str, str] | None = None,
    expected: Mapping[str, NDArray[Any]] | None = None,
    task: TaskChoice | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    states: Sequence[RecurrentState] = (),
) -> Path:
    """Write a package, and return its path.

    Args:
        folder: for the package, under the name of the model.
        name: of the model.
        model: ONNX, with any inputs and outputs.
        feeds: golden inputs.
        sign: makes the envelope.
        version: of the package; in the file's name unless it is the first.
        decode: codec of each input that arrives as a file of a codec.
        expected: golden outputs; by default what onnxruntime computes here.
        task: what the outputs mean.
        preprocessing: how a photograph becomes the input.
        states: of the manifest.
    """
    session: Session = OrtSession(model, OrtOptions(threads=1))
    options: dict[str, Any] = {"threads": 1}
    if decode:
        session, options = MediaSession(session, dict(decode)), {**options, "decode": dict(decode)}
    inputs = {spec.name: feeds[spec.name] for spec in session.inputs}
    golden, contents = store_golden(inputs, expected or session.run(dict(feeds)))
    roles = dict.fromkeys(contents, "golden") | {"model.onnx": "model"}
    contents["model.onnx"] = model
    if preprocessing is not None:
        contents["preprocessing.json"] = encode_json(dict(preprocessing))
        roles["preprocessing.json"] = "preprocessing"
    manifest = Manifest(
        name=name,
        version=version,
        target="x86-64",
        inputs=session.inputs,
        outputs=session.outputs,
        artifacts=describe_artifacts(contents, roles),
        backend=BackendChoice("ort", "model.onnx", options),
        golden=golden,
        task=task,
        preprocessing=None if preprocessing is None else "preprocessing.json",
        states=tuple(states),
    )
    path = folder / (f"{name}.edgepkg" if version == "1.0.0" else f"{name}-{version}.edgepkg")
    write_package(path, manifest, contents, sign)
    return path
