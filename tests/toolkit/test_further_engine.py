"""An engine that only two modules of the tests know goes the whole way of a package."""

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.further_engine import REFERENCE
from tests.toolkit.further_support import SUPPORTS, FurtherModel
from tests.toolkit.package_run import mlp, samples, saved

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.sessions import ENTRY_POINT_GROUP, open_session
from edgekit_runtime.system import engines
from edgekit_runtime.system.engines import Engine
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines import record as supports
from edgekit_toolkit.evaluation.host_memory import serve_once
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.engine_tournament import search_engines
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target
from edgekit_toolkit.targets.spec import Backend

pytestmark = pytest.mark.usefixtures("home")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """Register an engine for one test, and offer it to child processes as an entry point would."""
    record = REFERENCE
    monkeypatch.setitem(engines.ENGINES, record.name, record)
    monkeypatch.setitem(supports.SUPPORTS, record.name, SUPPORTS[record.name])
    information = tmp_path / "site" / "further-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: further\nVersion: 1.0\n")
    entry_point = f"{record.name} = tests.toolkit.further_engine:{record.name.upper()}"
    (information / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry_point}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return record


@pytest.fixture
def request_both(tmp_path: Path, engine: Engine) -> Request:
    calibration, evaluation = tmp_path / "calibration.npz", tmp_path / "evaluation.npz"
    np.savez(calibration, **samples(32, 1))
    np.savez(evaluation, **samples(64, 2))
    target = replace(load_target("x86-64"), backend=Backend(engine.name, "ort"))
    return Request(
        model=saved(mlp(1), tmp_path / "net.onnx"),
        target=target,
        budget=parse_budget("drop=50%"),
        name="net",
        version="1.0.0",
        calibration=calibration,
        evaluation=evaluation,
        threads=1,
        search_s=0.2,
        backend="auto",
    )


def search_alone(request: Request) -> Run:
    target = replace(request.target, backend=Backend(request.target.backend.default))
    return search_engines(replace(request, target=target), load_signer(), lambda *_: None)


def test_further_engine_is_searched_judged_and_measured_beside_another(request_both: Request) -> None:
    run = search_engines(request_both, load_signer(), lambda *_: None)
    assert [result.backend for result in run.tournament] == [request_both.target.backend.default, "ort"]
    assert [result.reason for result in run.tournament] == ["", ""]
    assert all(result.latency_ms for result in run.tournament)


def test_further_engine_runs_its_own_candidates_in_the_forms_of_its_record(request_both: Request) -> None:
    run = search_alone(request_both)
    kinds = {candidate.form.kind for candidate in run.candidates}
    assert kinds == {"float32", "float16-weights", "static-int8"}
    assert {type(candidate.model) for candidate in run.candidates} == {FurtherModel}
    assert run.scores.confirmation is not None


def test_package_for_a_further_engine_is_opened_and_served(request_both: Request, tmp_path: Path) -> None:
    chosen = search_alone(request_both).chosen
    assert chosen is not None
    keys = tmp_path / "keys"
    manifest = chosen.package.manifest
    path = tmp_path / manifest.file_name
    write_package(path, manifest, chosen.package.artifacts, load_signer(folder=keys))
    feeds = {"x": samples(1, 3)["x"]}

    with contextlib.closing(open_session(path, trust=TrustStore.from_folder(keys))) as session:
        outputs = session.run(feeds)

    assert outputs["y"].shape == (1, 4)
    assert serve_once(path, keys, "net", feeds) > 0


def test_engine_is_a_file_in_the_runtime_and_one_in_the_toolkit(tmp_path: Path) -> None:
    files = {
        "device_runtime/edgekit_runtime": (
            "from edgekit_runtime.system.engines import register\n"
            "from tests.toolkit.further_engine import REFERENCE\n"
            "register(REFERENCE)\n"
        ),
        "toolkit/edgekit_toolkit": (
            "from edgekit_toolkit.engines.record import register_support\n"
            "from tests.toolkit.further_support import SUPPORTS\n"
            "register_support(SUPPORTS['reference'])\n"
        ),
    }
    for package, text in files.items():
        folder = tmp_path / Path(package).name
        # With bytecode, but without files of it that others are about to write.
        shutil.copytree(ROOT / package, folder, ignore=shutil.ignore_patterns("*.pyc.*"))
        (folder / "engines" / "reference.py").write_text(text)
    code = (
        "from edgekit_cli.package import command\n"
        "from edgekit_toolkit.engines.record import list_supported\n"
        "(backend,) = [option for option in command.params if option.name == 'backend']\n"
        "print(*backend.type.choices); print(*list_supported())"
    )
    path = os.pathsep.join(map(str, (tmp_path, *sys.path, ROOT)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [
        "auto litert openvino ort reference tensorrt",
        "litert openvino ort reference tensorrt",
    ], done.stderr
