"""The packages that the tests install: models/tiny of the checkout, packaged for the target of a bench."""

import base64
import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import edgekit_hil
import edgekit_runtime
from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.paths import find_cache_folder

MODELS: Final = Path(edgekit_hil.__file__).parents[2] / "models" / "tiny"
MODEL_NAMES: Final = tuple(sorted(path.stem for path in MODELS.glob("*.onnx")))
_PACKAGE_LIMIT_S: Final = 300.0
_PROMISES: Final = {
    "latency_ms": "latency_on_target_ms",
    "energy_mj": "energy_on_target_mj",
    "memory_bytes": "memory",
}


@dataclass(frozen=True, slots=True)
class Promise:
    """What a package says of itself on its target.

    Attributes:
        value: in the unit of its name, or None.
        label: `measured`, `modelled` or `estimated`.
    """

    value: float | None
    label: str


class PackageMaker:
    """Makes packages by `edgekit package`, signed with a key of their own, and keeps them between runs.

    Attributes:
        public_key: file that a device trusts.
    """

    def __init__(self) -> None:
        self._folder = find_cache_folder() / "hil" / "packages" / _hash_sources()
        self.public_key = self._folder / "bench.pub.pem"

    def make(self, model: str, target: str, backend: str, version: str = "1.0.0") -> Path:
        """Return the package of a model of models/tiny.

        Args:
            model: its name.
            target: as in `edgekit targets`.
            backend: as `edgekit package` takes it; `auto` carries a variant for each engine of the target.
            version: of the package.

        Raises:
            BenchError: `edgekit package` failed.
        """
        kept = self._folder / f"{model}-{target}-{backend}-{version}"
        if not kept.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            if not self.public_key.exists():
                self._edgekit("keys", "generate", "default")
                self._edgekit("keys", "export", "default", str(self.public_key))
            with tempfile.TemporaryDirectory(dir=self._folder) as folder:
                made = Path(folder) / "made"
                stem = MODELS / model
                self._edgekit(
                    *("package", f"{stem}.onnx", "--calibration", f"{stem}.calib.npz"),
                    *("--eval", f"{stem}.eval.npz", "--target", target, "--backend", backend),
                    *("--version", version, "--search-seconds", "0", "--out", str(made)),
                    *(("--variants", "2") if backend == "auto" else ()),
                )
                if not kept.is_dir():
                    made.rename(kept)
        (package,) = kept.glob("*.edgepkg")
        return package

    def read_promise(self, package: Path, what: str) -> Promise:
        """Return what a package promises: `latency_ms`, `energy_mj` or `memory_bytes`."""
        envelope = json.loads(package.with_suffix(".evidence.json").read_text(encoding="utf-8"))
        predicate: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
        stated = predicate.get(_PROMISES[what]) or {}
        return Promise(stated.get("value"), stated.get("label", ""))

    def _edgekit(self, *arguments: str) -> None:
        environment = ["env", f"EDGEKIT_HOME={self._folder / 'home'}"]
        command = [*environment, sys.executable, "-m", "edgekit_toolkit", *arguments]
        result = run_program(command, (), _PACKAGE_LIMIT_S, 0)
        if result.exit_code:
            raise BenchError(
                f"`edgekit {' '.join(arguments)}` ended with {result.exit_code}: {result.last_line}"
            )


def _hash_sources() -> str:
    """Return a digest of what packages are made from: models, runtime and toolkit."""
    runtime = Path(edgekit_runtime.__file__).parent
    beside = [
        runtime.parent / "edgekit_toolkit",
        runtime.parents[1] / "toolkit",
    ]  # in a release, in a checkout
    digest = hashlib.sha256()
    for folder in (MODELS, runtime, *beside):
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"), *folder.rglob("*.onnx"))):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
