"""The packages that the tests install: models/tiny of the checkout, packaged for the target of a bench."""

import sys
from pathlib import Path
from typing import Final

from edgekit_runtime.errors import BenchError
from edgekit_runtime.system.child_process import run_program

MODELS: Final = Path(__file__).resolve().parents[3] / "models" / "tiny"
_PACKAGE_LIMIT_S: Final = 300.0


class PackageMaker:
    """Makes packages by `edgekit package`, each once, signed with a key of its own.

    Attributes:
        public_key: file that a device trusts.
    """

    def __init__(self, folder: Path) -> None:
        """Make packages in `folder`."""
        self._folder = folder
        self.public_key = folder / "bench.pub.pem"
        self._made: dict[tuple[str, ...], Path] = {}

    def make(self, model: str, target: str, backend: str, version: str = "1.0.0") -> Path:
        """Return the package of a model of models/tiny.

        Raises:
            BenchError: `edgekit package` failed.
        """
        wanted = (model, target, backend, version)
        if wanted not in self._made:
            out = self._folder / "-".join(wanted)
            stem = MODELS / model
            self._edgekit(
                *(
                    "package",
                    f"{stem}.onnx",
                    "--calibration",
                    f"{stem}.calib.npz",
                    "--eval",
                    f"{stem}.eval.npz",
                ),
                *("--target", target, "--backend", backend, "--version", version),
                *("--search-seconds", "0", "--out", str(out)),
            )
            (self._made[wanted],) = out.glob("*.edgepkg")
            if not self.public_key.exists():
                self._edgekit("keys", "export", "default", str(self.public_key))
        return self._made[wanted]

    def _edgekit(self, *arguments: str) -> None:
        environment = ["env", f"EDGEKIT_HOME={self._folder / 'home'}"]
        command = [*environment, sys.executable, "-m", "edgekit_toolkit", *arguments]
        result = run_program(command, (), _PACKAGE_LIMIT_S, 0)
        if result.exit_code:
            raise BenchError(
                f"`edgekit {' '.join(arguments)}` ended with {result.exit_code}: {result.last_line}"
            )
