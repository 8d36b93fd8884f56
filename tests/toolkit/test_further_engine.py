"""An engine that only two modules of the tests know goes the whole way of a package."""

import contextlib
import importlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.toolkit.further_engine import REFERENCE
from tests.toolkit.further_support import SUPPORT, ReferenceModel
from tests.toolkit.package_run import mlp, samples, saved

from edgekit_runtime.package.archive import write_package
from edgekit_runtime.sessions import ENTRY_POINT_GROUP, open_session
from edgekit_runtime.system import engines
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines import record
from edgekit_toolkit.evaluation.host_memory import serve_once
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.engine_tournament import search_engines
from edgekit_toolkit.pipeline.request import Request
from edgekit_toolkit.pipeline.run import Run
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target
from edgekit_toolkit.targets.spec import Backend

pytestmark = pytest.mark.usefixtures("home", "installed")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the engine for one test, and offer it to child processes as an entry point would."""
    monkeypatch.setitem(engines._engines, REFERENCE.name, REFERENCE)
    monkeypatch.setitem(record._supports, SUPPORT.name, SUPPORT)
    information = tmp_path / "site" / "further-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: further\nVersion: 1.0\n")
    entry_point = f"{REFERENCE.name} = {REFERENCE.open_model.__module__}:REFERENCE"
    (information / "entry_points.txt").write_text(f"[{ENTRY_POINT_GROUP}]\n{entry_point}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()


@pytest.fixture
def request_both(tmp_path: Path) -> Request:
    calibration, evaluation = tmp_path / "calibration.npz", tmp_path / "evaluation.npz"
    np.savez(calibration, **samples(32, 1))
    np.savez(evaluation, **samples(64, 2))
    target = replace(load_target("x86-64"), backend=Backend(REFERENCE.name, "ort"))
    return Request(
        model=saved(mlp(1), tmp_path / "net.onnx"),
        target=target,
        budget=parse_budget("drop=50%"),
        name="net",
        version="1.0.0",
        calibration=calibration,
        evaluation=evaluation,
        threads=1,
        search_s=1.0,
        backend="auto",
    )


def search_reference(request: Request) -> Run:
    target = replace(request.target, backend=Backend(REFERENCE.name))
    return search_engines(replace(request, target=target), load_signer(), lambda *_: None)


def test_further_engine_is_searched_judged_and_measured_beside_another(request_both: Request) -> None:
    run = search_engines(request_both, load_signer(), lambda *_: None)
    assert [result.backend for result in run.tournament] == [REFERENCE.name, "ort"]
    assert [result.reason for result in run.tournament] == ["", ""]
    assert all(result.latency_ms for result in run.tournament)


def test_further_engine_runs_its_own_candidates_in_the_forms_of_its_record(request_both: Request) -> None:
    run = search_reference(request_both)
    kinds = {candidate.form.kind for candidate in run.candidates}
    assert kinds == {"float32", "float16-weights", "static-int8"}
    assert {type(candidate.model) for candidate in run.candidates} == {ReferenceModel}
    assert run.scores.confirmation is not None


def test_package_for_a_further_engine_is_opened_and_served(request_both: Request, tmp_path: Path) -> None:
    chosen = search_reference(request_both).chosen
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
