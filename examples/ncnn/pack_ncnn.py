"""Puts a model that you converted for ncnn in place of the model of a float package, and checks its outputs.

    pack_ncnn.py PACKAGE.edgepkg MODEL.param MODEL.bin OUT.edgepkg

ncnn's converter ends with exit code 0 on operators that ncnn lacks. So the new package is only kept if ncnn
computes the golden outputs, which the engine of the first package computed.
"""

import contextlib
import sys
from dataclasses import replace
from pathlib import Path

from edgekit_runtime.errors import BackendError, EdgekitError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.assemble import describe_artifacts
from edgekit_toolkit.packaging.signing_keys import load_signer

FLOAT_FORMS = ("float32", "float16-weights")  # golden outputs of int8 allow 10 % of the range


def pack(source: Path, param: Path, weights: Path, out: Path) -> None:
    """Write the package `out`.

    Raises:
        BackendError: the source is no float package, or ncnn computes other outputs.
    """
    trust = TrustStore.from_folder(find_keys_folder())
    with read_package(source, trust) as package:
        manifest = package.manifest
        if manifest.provenance.get("form") not in FLOAT_FORMS or manifest.variants:
            raise BackendError(f"{source}: expected a package of one float form; see README.md")
        models = {choice.artifact for choice in manifest.backend.chain}
        contents = {
            artifact.path: bytes(package.read(artifact.path))
            for artifact in manifest.artifacts
            if artifact.path not in models
        }
        roles = {artifact.path: artifact.role for artifact in manifest.artifacts if artifact.path in contents}
    contents |= {"model.param": param.read_bytes(), "model.bin": weights.read_bytes()}
    roles |= dict.fromkeys(("model.param", "model.bin"), "model")
    changed = replace(
        manifest,
        backend=BackendChoice("ncnn", "model.param", {"weights": "model.bin"}),
        artifacts=describe_artifacts(contents, roles),
        figures={},  # those of the other engine
    )
    write_package(out, changed, {path: contents[path] for path in sorted(contents)}, load_signer())
    try:
        with contextlib.closing(open_session(out)) as session, read_package(out, trust) as written:
            result = run_selftest(session, written)
        if not result.passed:
            faults = "; ".join(check.message for check in result.checks if not check.passed)
            raise BackendError(f"{param}: ncnn computes other outputs than {source.name}: {faults}")
    except EdgekitError:
        out.unlink()
        raise


if __name__ == "__main__":
    try:
        pack(*map(Path, sys.argv[1:5]))
    except EdgekitError as error:
        sys.exit(f"pack_ncnn: {error}")
