"""Do the aarch64 wheels of the engines run our packages? Shown on x86-64, under qemu-user.

    PYTHONPATH=device_runtime:toolkit .venv/bin/python hil/qemu_aarch64.py [--cpu CPU] [MODEL.tflite ...]

On Debian or Ubuntu with `apt-get install qemu-user-static`. It fetches an aarch64 CPython with its libraries
from the distribution's own archive and the engines' wheels from the package index, all into a folder of its
own (`--root`, kept between calls). Then it packages every model of models/tiny for the Raspberry Pi 5 with
both engines, for Android (LiteRT) and for the Jetson (whose fallback, onnxruntime, runs here), and each
`.tflite` that is named with this machine's own outputs as golden ones, and runs the self-test of each package
under qemu on every engine that it names. It shows that wheels load and compute right on the instructions of
one CPU, by default the Raspberry Pi 5's. It measures nothing: time under an emulator is no time.
"""

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[1]
ENGINES: Final = (
    "onnxruntime==1.24.4",
    "onnxruntime==1.26.0",
    "onnxruntime==1.31.1",
    "ai-edge-litert==2.1.6",
    "ai-edge-litert==2.3.0",
)
# What the runtime needs besides an engine, and what onnxruntime's own import needs.
COMMON: Final = (
    *("securesystemslib", "cryptography", "cffi", "pycparser"),
    *("flatbuffers", "packaging", "protobuf"),
)
PLATFORMS: Final = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_17", "manylinux2014")
PACKAGINGS: Final = (("rpi5", "ort"), ("rpi5", "litert"), ("android-arm64", "litert"), ("jetson", "tensorrt"))
TIME_LIMIT_S: Final = 600
CHILD: Final = """
import dataclasses, json, platform, sys
from pathlib import Path
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.sessions import open_choice
from edgekit_runtime.trust.trust_store import TrustStore

with read_package(Path(sys.argv[1]), TrustStore.from_folder(Path(sys.argv[2]))) as package:
    (choice,) = [c for c in package.manifest.backend.chain if c.name == sys.argv[3]]
    session = open_choice(package, dataclasses.replace(choice, fallback=None), 1)
    test = run_selftest(session, package)
print(json.dumps({
    "machine": platform.machine(), "passed": test.passed, "message": "; ".join(c.message for c in test.checks)
}))
"""


def run(command: Sequence[str | Path], **options: Any) -> str:
    """Return what a command prints; its errors end this program."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, **options)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\nended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def fetch_python(root: Path) -> Path:
    """Return the aarch64 interpreter below `root/system`, fetched on the first call.

    apt works on folders of its own, so that this machine stays of one architecture.
    """
    system = root / "system"
    if not (system / "usr" / "bin" / "python3").exists():
        state, cache = root / "apt" / "state", root / "apt" / "cache"
        for folder in (state / "lists" / "partial", cache / "archives" / "partial", system):
            folder.mkdir(parents=True, exist_ok=True)
        status = root / "apt" / "status"
        status.touch()
        options = {
            "Dir::State": state,
            "Dir::Cache": cache,
            "Dir::State::status": status,
            "APT::Architecture": "arm64",
            "APT::Architectures": "arm64",
            "APT::Sandbox::User": "",
            "Debug::NoLocking": "true",
        }
        apt = ["apt-get", "-qq", *(f"--option={name}={value}" for name, value in options.items())]
        run([*apt, "update"])
        run([*apt, "install", "--yes", "--download-only", "--no-install-recommends", "python3", "libstdc++6"])
        for package in sorted((cache / "archives").glob("*.deb")):
            run(["dpkg-deb", "--extract", package, system])
    return (system / "usr" / "bin" / "python3").resolve()


def fetch_engine(root: Path, python: Path, engine: str) -> Path:
    """Return a folder with the wheels of `engine` for `python`."""
    folder = root / "engines" / engine.replace("==", "-")
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        version = python.name.removeprefix("python")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        pip += ["--python-version", version, "--target", str(folder)]
        pip += [word for name in PLATFORMS for word in ("--platform", f"{name}_aarch64")]
        run([*pip, "numpy<2.5", engine, *COMMON])
        (folder / "complete").touch()
    return folder


def make_packages(root: Path, tflites: Sequence[Path]) -> Iterator[Path]:
    """Yield packages of models/tiny, made by the toolkit, and of each `.tflite` file."""
    os.environ["EDGEKIT_HOME"] = str(root / "home")
    from edgekit_toolkit.cli import main

    for target, backend in PACKAGINGS:
        out = root / "packages" / f"{target}-{backend}"
        out.mkdir(parents=True, exist_ok=True)
        for model in sorted((ROOT / "models" / "tiny").glob("*.onnx")):
            stem = str(model.with_suffix(""))
            command = ["package", str(model), "--target", target, "--backend", backend, "--out", str(out)]
            command += ["--calibration", f"{stem}.calib.npz", "--eval", f"{stem}.eval.npz"]
            if not list(out.glob(f"{model.stem}-*.edgepkg")):
                with contextlib.redirect_stdout(io.StringIO()):
                    main(command)
            yield from out.glob(f"{model.stem}-*.edgepkg")
    out = root / "packages" / "wrapped"
    out.mkdir(parents=True, exist_ok=True)
    for path in tflites:
        yield wrap(path, out)


def wrap(path: Path, out: Path) -> Path:
    """Return a package of a `.tflite` file; its golden outputs are those of this machine's LiteRT."""
    from edgekit_runtime.package.archive import write_package
    from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
    from edgekit_runtime.package.manifest import Artifact, BackendChoice, Manifest
    from edgekit_runtime.sessions.litert.session import LiteRtSession
    from edgekit_toolkit.packaging.signing_keys import load_signer

    session = LiteRtSession(path)
    rng = np.random.default_rng(0)
    artifacts, inputs, outputs, feeds = {"model.tflite": path.read_bytes()}, [], [], {}
    for index, spec in enumerate(session.inputs):
        shape = tuple(size if isinstance(size, int) else 1 for size in spec.shape)
        feeds[spec.name] = rng.normal(0, 1, shape).astype(spec.dtype)
        artifacts[f"golden/in{index}.bin"] = feeds[spec.name].tobytes()
        inputs.append(GoldenInput(spec.name, spec.dtype, shape, f"golden/in{index}.bin"))
    for index, (name, array) in enumerate(session.run(feeds).items()):
        member = f"golden/out{index}.bin"
        artifacts[member] = array.tobytes()
        # Codes may differ by one where two machines round a sum in another order.
        step = session.quantization[name].scale * 1.01 if name in session.quantization else 0.0
        outputs.append(GoldenOutput(name, array.dtype.name, array.shape, member, 1e-4 + step, 1e-3))
    entries = tuple(
        Artifact(name, len(data), hashlib.sha256(data).hexdigest(), "golden" if "/" in name else "model")
        for name, data in sorted(artifacts.items())
    )
    manifest = Manifest(
        name=path.stem,
        version="1.0.0",
        target="rpi5",
        inputs=session.inputs,
        outputs=session.outputs,
        artifacts=entries,
        backend=BackendChoice("litert", "model.tflite", {"threads": 1}),
        golden=Golden(tuple(inputs), tuple(outputs)),
    )
    package = out / manifest.file_name
    write_package(package, manifest, artifacts, load_signer())
    return package


def try_package(root: Path, python: Path, engine: Path, package: Path, cpu: str) -> str:
    """Return `yes`, or `no` with the reason."""
    system = root / "system"
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONHOME": str(system / "usr"),
        "PYTHONPATH": f"{engine}:{ROOT / 'device_runtime'}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "QEMU_CPU": cpu,
    }
    keys, backend = root / "home" / "keys", backend_of(engine.name)
    command = ["qemu-aarch64-static", "-L", system, python, "-S", "-c", CHILD, package, keys, backend]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=TIME_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"no: nothing within {TIME_LIMIT_S} s"
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return f"no: ended with {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
    right = answer["passed"] and answer["machine"] == "aarch64"
    return "yes" if right else f"no: {answer['machine']}: {answer['message']}"


def main() -> int:
    """Print a table; 0 when every package runs on every engine that it names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("tflite", nargs="*", type=Path)
    parser.add_argument("--engine", action="append", help=f"default: {', '.join(ENGINES)}")
    parser.add_argument("--cpu", default="cortex-a76", help="as qemu names it; default: %(default)s")
    parser.add_argument("--root", type=Path, default=Path.home() / ".cache" / "edgekit" / "qemu-aarch64")
    arguments = parser.parse_args()
    if shutil.which("qemu-aarch64-static") is None:
        sys.exit("qemu-aarch64-static is missing: apt-get install qemu-user-static")
    root = arguments.root.absolute()
    python = fetch_python(root)
    packages = list(make_packages(root, arguments.tflite))
    failed = 0
    for engine in arguments.engine or ENGINES:
        folder = fetch_engine(root, python, engine)
        for package in packages:
            if backend_of(engine) in backends_of(package):
                verdict = try_package(root, python, folder, package, arguments.cpu)
                failed += verdict != "yes"
                name = f"{package.parent.name}/{package.stem}"
                print(f"| {arguments.cpu} | {engine} | {name} | {verdict} |", flush=True)
    return 1 if failed else 0


def backend_of(engine: str) -> str:
    """Return the name of the backend that an engine serves."""
    return "ort" if engine.startswith("onnxruntime") else "litert"


def backends_of(package: Path) -> set[str]:
    """Return the names of the backends that a package names."""
    from edgekit_runtime.package.archive import read_unverified_manifest

    return {choice.name for choice in read_unverified_manifest(package).manifest.backend.chain}


if __name__ == "__main__":
    sys.exit(main())
