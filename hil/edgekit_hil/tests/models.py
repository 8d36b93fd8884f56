"""The packages that the tests install: models/tiny of the checkout, and a large model, for a bench."""

import base64
import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import itertools
import json
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography.hazmat.primitives.serialization import load_pem_private_key
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]  # has no __all__

import edgekit_hil
import edgekit_runtime
from edgekit_hil.images.programs import run_checked
from edgekit_hil.tests import large_model
from edgekit_hil.tests.bench_target import TOOLKIT
from edgekit_host.evidence import list_committed
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import BenchError
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import Artifact, BackendChoice
from edgekit_runtime.system.child_process import run_program
from edgekit_runtime.system.paths import find_cache_folder, find_config_folder
from edgekit_runtime.trust.dsse import Envelope, encode_signed
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.measurement import brevity

MODELS: Final = Path(edgekit_hil.__file__).parents[2] / "models" / "tiny"
MODEL_NAMES: Final = tuple(sorted(path.stem for path in MODELS.glob("*.onnx")))
_PACKAGE_LIMIT_S: Final = 1800.0  # on a machine that others use too, a package takes ten times as long
_CUT_TABLE: Final = "cut-table.json"
_PROMISES: Final = {
    "latency_ms": "latency_held_against_limits",
    "energy_mj": "energy_on_target_mj",
    "memory_bytes": "memory",
}


@dataclass(frozen=True, slots=True)
class Promise:
    """A figure that a package states for its target.

    Attributes:
        value: value in the unit of its name, or None.
        label: `measured`, `calibrated`, `modelled` or `estimated`.
        source: source of a latency or an energy.
    """

    value: float | None
    label: str
    source: str = ""


class PackageMaker:
    """Makes packages by `edgekit package`, signed with a key of their own, and keeps them between runs.

    Args:
        limit_s: limit of time for one command.
    """

    def __init__(self, limit_s: float = _PACKAGE_LIMIT_S) -> None:
        self._limit_s = limit_s

    @functools.cached_property
    def _folder(self) -> Path:
        return find_cache_folder() / "hil" / "packages" / _hash_sources()

    @property
    def home(self) -> Path:
        """The configuration of edgekit with the key."""
        return self._folder / "home"

    @property
    def public_key(self) -> Path:
        """File that a device trusts."""
        return self._folder / "bench.pub.pem"

    def make(self, model: str, target: str, backend: str, version: str = "1.0.0") -> Path:
        """Return the package of a model of models/tiny, or of the large one.

        Args:
            model: name of the model.
            target: a name of `edgekit targets`.
            backend: backend as for `edgekit package`; with `auto` the package has a variant for each engine.
            version: version of the package.

        Raises:
            BenchError: `edgekit package` failed.
        """
        file = find_config_folder() / "targets" / f"{target}.toml"
        own = hashlib.sha256(file.read_bytes()).hexdigest()[:8] if file.is_file() else ""
        cache_folder = self._folder / f"{model}-{target}{own}-{backend}-{version}"
        stem = MODELS / model

        def make(new_folder: Path) -> None:
            source = ["--calibration", f"{stem}.calib.npz", "--eval", f"{stem}.eval.npz", f"{stem}.onnx"]
            if model == large_model.NAME:
                source = ["--budget", "size=100MB,drop=5%", f"{new_folder}/{model}.onnx"]
                large_model.write_large_model(new_folder / f"{model}.onnx")
            options = {
                "--target": str(file) if own else target,
                "--backend": backend,
                "--version": version,
                "--search-seconds": "0",
                "--out": str(new_folder),
                **({"--variants": "2"} if backend == "auto" else {}),
            }
            self._edgekit("package", *source, *itertools.chain.from_iterable(options.items()))
            (new_folder / f"{model}.onnx").unlink(missing_ok=True)

        self._keep(cache_folder, make)
        (package,) = cache_folder.glob("*.edgepkg")
        return package

    def make_certificate(self, address: str) -> Path:
        """Return a folder with `cert.pem` and `key.pem` of a server at an IP address, and a `token`.

        Raises:
            BenchError: openssl failed.
        """
        cache_folder = self._folder / f"server-{address}"

        def make(new_folder: Path) -> None:
            key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"]
            key += ["-keyout", f"{new_folder}/key.pem"]
            name = ["-subj", "/CN=edgekit bench", "-addext", f"subjectAltName=IP:{address}"]
            run_checked(
                ["openssl", "req", "-x509", "-days", "3650", *key, *name, "-out", f"{new_folder}/cert.pem"]
            )
            (new_folder / "token").touch(0o600)
            (new_folder / "token").write_text(secrets.token_hex(16))

        self._keep(cache_folder, make)
        return cache_folder

    def offload(self, package: Path, folder: Path, local_s: float) -> Path:
        """Write a copy of a package into `folder` with a plan that runs it on a server of that package.

        Args:
            package: package from `make`.
            folder: folder for the copy; not that of `package`.
            local_s: seconds of a run on the device alone, as the copy's cut table states.
        """
        with read_package(package, TrustStore.from_folder(self.home / "keys")) as opened:
            manifest = opened.manifest
            contents = {artifact.path: bytes(opened.read(artifact.path)) for artifact in manifest.artifacts}
        costs = PlanCosts(0.0, 1e-3, upload_bytes=4e3, download_bytes=1e2)
        plans = (OffloadPlan("local", PlanCosts(local_s)), OffloadPlan("raw", costs, tail=manifest.name))
        contents[_CUT_TABLE] = table = json.dumps(to_plain(CutTable(plans))).encode()
        entry = Artifact(_CUT_TABLE, len(table), hashlib.sha256(table).hexdigest(), "cut-table")
        own = manifest.backend
        changed = dataclasses.replace(
            manifest,
            artifacts=tuple(sorted((*manifest.artifacts, entry), key=lambda artifact: artifact.path)),
            backend=BackendChoice("offload", own.artifact, own.options, own),
        )
        write_package(folder / package.name, changed, contents, self._sign)
        return folder / package.name

    def _sign(self, payload: bytes) -> bytes:
        """Return the envelope around a payload, signed as `edgekit package` does."""
        private = load_pem_private_key((self.home / "keys" / "default.pem").read_bytes(), None)
        signature = CryptoSigner(private).sign(encode_signed(payload))
        return Envelope(payload, signature.keyid, bytes.fromhex(signature.signature)).to_bytes()

    def read_promise(self, package: Path, figure: str) -> Promise:
        """Return a figure that a package promises: `latency_ms`, `energy_mj` or `memory_bytes`."""
        envelope = json.loads(package.with_suffix(".evidence.json").read_text(encoding="utf-8"))
        predicate: dict[str, Any] = json.loads(base64.b64decode(envelope["payload"]))["predicate"]
        stated = predicate.get(_PROMISES[figure]) or {}
        label = stated.get("label", "")
        source = (
            "a run where the package was made" if label == "measured" else predicate.get("cost_source", "")
        )
        return Promise(stated.get("value"), label, source)

    def _keep(self, cache_folder: Path, make: Callable[[Path], None]) -> None:
        """Fill a folder, unless that was done in an earlier run."""
        if cache_folder.is_dir():
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        with self._lock():
            if not self.public_key.exists():
                self._edgekit("keys", "generate", "default")
                self._edgekit("keys", "export", "default", str(self.public_key))
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            new_folder = Path(folder) / "made"
            new_folder.mkdir()
            make(new_folder)
            with self._lock():
                if not cache_folder.is_dir():
                    new_folder.rename(cache_folder)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Keep the makers of other runs out during the block: several benches may be tested at one time."""
        with (self._folder / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _edgekit(self, *arguments: str) -> None:
        environment = ["env", f"EDGEKIT_HOME={self.home}"]
        command = [*environment, sys.executable, "-m", TOOLKIT, *arguments]
        result = run_program(command, (), self._limit_s, 0)
        if result.exit_code is None:
            raise BenchError(f"`edgekit {' '.join(arguments)}` did not end within {self._limit_s:g} s")
        if result.exit_code:
            raise BenchError(
                f"`edgekit {' '.join(arguments)}` ended with {result.exit_code}: {result.last_line}"
            )


def _hash_sources() -> str:
    """Return a digest of what packages depend on: models, our code, versions, measured costs, brevity."""
    runtime = Path(edgekit_runtime.__file__).parent
    beside = [
        runtime.parent / "edgekit_toolkit",
        runtime.parents[1] / "toolkit",
        runtime.parent / "edgekit_host",
        runtime.parents[1] / "host",
    ]  # in a release, in a checkout
    # Names of folders with name and version: their metadata takes a second to read on a small machine.
    versions = sorted({path.name for entry in sys.path for path in Path(entry).glob("*.dist-info")})
    digest = hashlib.sha256("\n".join((*versions, os.environ.get(brevity.VARIABLE, ""))).encode())
    paths = [
        path
        for folder in (MODELS, runtime, *beside)
        for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.toml"), *folder.rglob("*.onnx")))
    ]
    for path in (*paths, Path(large_model.__file__), *sorted(list_committed().glob("*.json"))):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]
