"""Do the aarch64 wheels of the engines run our packages? Shown under qemu-user, for one processor at a time.

    scripts/python -m benchmarks.hil_arm64_engines

On the ARM64 userland (make its image first: `./edgekit hil image`), with the wheels of each release of an
engine instead of the image's own. The packages of models/tiny for `rpi5` run their self-tests. It
shows that wheels load and compute right on the instructions of one processor; time under an emulator is none.
About ten minutes on two cores for all engines.
"""

import json
import sys
from pathlib import Path
from typing import Final

from benchmarks.results import make_parser
from labgrid import Target

import edgekit_runtime
from edgekit_hil.benches.device import Device
from edgekit_hil.drivers.userland import UserlandDriver
from edgekit_hil.images import recipe
from edgekit_hil.images.image_cache import find_image
from edgekit_hil.images.root_folder import find_python, install_wheels
from edgekit_hil.tests.models import MODEL_NAMES, PackageMaker
from edgekit_hil.tests.programs import read_program
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.paths import find_cache_folder

ENGINES: Final = (
    *("onnxruntime==1.24.4", "onnxruntime==1.26.0", "onnxruntime==1.31.1"),
    *("ai-edge-litert==2.1.6", "ai-edge-litert==2.3.0"),
)
TARGET: Final = "rpi5"
LIMIT_S: Final = 300.0


def fetch_engine(engine: str) -> Path:
    """Return a folder with the wheels of an engine, fetched on the first call."""
    folder = find_cache_folder() / "hil" / "engines" / engine.replace("==", "-")
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        install_wheels([engine, "numpy==2.4.6"], find_python(find_image(booted=False).root), folder)
        (folder / "complete").touch()
    return folder


def try_package(device: Device, package: Path, backend: str) -> str:
    remote = device.put(package, "model.edgepkg")
    try:
        checks = json.loads(device.run_python(read_program("selftest"), remote, backend, limit_s=LIMIT_S))
    except BenchError as error:
        return f"no: {' '.join(str(error).split())[-200:]}"
    return "yes" if all(passed for _, passed, *_ in checks) else f"no: {checks}"


def try_engine(engine: str, cpu: str, packages: PackageMaker) -> dict[str, str]:
    backend = "ort" if engine.startswith("onnxruntime") else "litert"
    folders = [str(fetch_engine(engine)), str(Path(edgekit_runtime.__file__).parents[1])]
    target = Target("engines")
    driver = UserlandDriver(target, "device", cpu=cpu, read_only=folders)
    target.activate(driver)
    try:
        device = Device(driver, driver, "/srv/engines", "python3")
        made = {name: packages.make(name, TARGET, backend) for name in MODEL_NAMES}
        device.edgekit("keys", "trust", device.put(packages.public_key, "bench.pub.pem"))
        return {name: try_package(device, package, backend) for name, package in made.items()}
    finally:
        target.deactivate(driver)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--engine", action="append", help=f"default: {', '.join(ENGINES)}")
    parser.add_argument("--cpu", default=recipe.CPU, help="as qemu names it; default: %(default)s")
    arguments = parser.parse_args()
    packages, failed = PackageMaker(), 0
    print("| processor | engine | model | runs |\n|---|---|---|---|")
    for engine in arguments.engine or ENGINES:
        for name, verdict in try_engine(engine, arguments.cpu, packages).items():
            failed += verdict != "yes"
            print(f"| {arguments.cpu} | {engine} | {name} | {verdict} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
