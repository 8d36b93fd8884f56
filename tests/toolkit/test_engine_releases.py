"""Every form opens on every release of onnxruntime that a device may have, and computes what this one does.

CI has pip install them into the cache (EDGEKIT_ENGINE_RELEASES=1); elsewhere the tests need them there.
The pinned release runs on both kinds of processors: natively, and by `scripts/test-without-vnni`.
"""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.small_models import random_feeds
from tests.toolkit.test_quantize_forms import all_forms, network

from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime.sessions.ort_products import saturates
from edgekit_runtime.system.paths import find_cache_folder
from edgekit_toolkit.models.onnx import OnnxModel
from edgekit_toolkit.quantize.forms import FLOAT32, build

PINNED = pytest.param("pinned", marks=pytest.mark.int8_products)  # minutes a release on an emulated processor
RELEASES = ("1.20.1", PINNED, "1.31.0", "1.31.1", "1.32.0")
"""The oldest that a device may have, the one that it gets, and the three newest."""

# Prints what each model gives, one after the other, so that an abort shows at which one.
OPEN = """
import json, sys
import numpy as np
import onnxruntime
from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
x = np.load(sys.argv[1])
print(json.dumps(onnxruntime.__version__), flush=True)
for path, options in json.loads(sys.argv[2]):
    print(json.dumps(path), flush=True)
    session = OrtSession(open(path, "rb").read(), read_options(OrtOptions, "ort", options, 1))
    print(json.dumps(session.run({"x": x})["y"].tolist()), flush=True)
"""


def release_of(name: str) -> str:
    if name != "pinned":
        return name
    pinned = read_pinned("ort", "x86_64", ".".join(map(str, sys.version_info[:3])))
    return next(line for line in pinned if line.startswith("onnxruntime==")).split("==")[1].split()[0]


@functools.cache
def install(release: str) -> Path:
    """Return the folder of a release; skip the test where it cannot be had."""
    folder = find_cache_folder() / "test-engines" / f"onnxruntime-{release}-{sys.implementation.cache_tag}"
    if not folder.is_dir():
        if "EDGEKIT_ENGINE_RELEASES" not in os.environ:
            pytest.skip(f"onnxruntime {release} is not in the cache; EDGEKIT_ENGINE_RELEASES=1 fetches it")
        part = folder.with_suffix(f".{os.getpid()}")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*pip, "--target", str(part), f"onnxruntime=={release}"],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode:
            pytest.skip(f"onnxruntime {release} is not to be had here: {done.stderr.strip()[-200:]}")
        if not folder.is_dir():
            part.rename(folder)
    return folder


@dataclass(frozen=True)
class Written:
    """The models of all forms.

    Attributes:
        x: path of their input.
        models: path and options of each.
        expected: output of each on the release that is here.
    """

    x: Path
    models: Sequence[tuple[str, Mapping[str, Any]]]
    expected: Sequence[NDArray[Any]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("forms")
    feeds = random_feeds(network(), np.random.default_rng(20))
    np.save(folder / "x.npy", feeds["x"])
    models, expected = [], []
    for title, form in all_forms().items():
        made = OnnxModel(network() if form.kind == FLOAT32 else build(network(), form))  # type: ignore[arg-type]
        path = folder / f"{title}.onnx"
        path.write_bytes(made.content)
        models.append((str(path), dict(made.options)))
        expected.append(made.open_session(threads=1).run(feeds)["y"])
    return Written(folder / "x.npy", models, expected)


@pytest.mark.parametrize("name", RELEASES)
def test_every_form_opens_on_a_release_and_computes_the_same(name: str, written: Written) -> None:
    release = release_of(name)
    folder = install(release)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}
    command = [sys.executable, "-c", OPEN, str(written.x), json.dumps(written.models)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    where = f"onnxruntime {release}, {'without' if saturates() else 'with'} VNNI: {done.stderr[-300:]}"
    assert (lines[0], done.returncode) == (release, 0), f"{where}: {lines[-1]}"
    for (path, _), want, got in zip(written.models, written.expected, lines[2::2], strict=True):
        limit = 0.02 * np.abs(want).max()
        assert np.abs(np.asarray(got) - want).max() <= limit, f"{where}: {path}"
