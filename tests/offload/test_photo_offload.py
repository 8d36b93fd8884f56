"""Photographs from the plan to the answer: a JPEG is planned, packaged, served, sent and decoded."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from tests.free_port import free_port
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.offload_service import serving
from tests.offload.test_planner import inputs_of, narrowing_model, photos
from tests.service.serve_parts import wait_ready
from tests.waiting import wait_for

from edgekit_offload.packaging.plan_package import attach
from edgekit_offload.partition.opened_model import OpenedModel
from edgekit_offload.planning.cut_candidates import CutCandidate
from edgekit_offload.planning.measurement import CutMeasurement
from edgekit_offload.planning.plan_inputs import ExtractedPlan
from edgekit_offload.planning.planner import plan
from edgekit_offload.planning.result import PlanningResult, Refusal
from edgekit_offload.planning.uploads import UploadCandidate
from edgekit_runtime.offload.cut_table import CutTable
from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan, PlanCosts
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

pytest.importorskip("PIL", reason="needs Pillow")

SIDE = 64


class SlowDevice:
    """Measures uploads as they are, but says that the device takes ten seconds and leaves cuts out."""

    def __init__(self, content: bytes, feeds: list[dict[str, np.ndarray]]) -> None:
        machine = MACHINE_HERE
        self.measured = CutMeasurement(
            model=OpenedModel(content), feeds=feeds, device=machine, server=machine, seconds=0.01
        )

    def __call__(
        self, uploads: Sequence[UploadCandidate], cuts: Sequence[CutCandidate]
    ) -> Mapping[str, ExtractedPlan | Refusal]:
        found = dict(self.measured(uploads, ()))
        found |= {one.plan.name: Refusal(one.plan.name, "It is left out.") for one in cuts}
        found[LOCAL] = ExtractedPlan(OffloadPlan(LOCAL, PlanCosts(10.0, is_measured=True)), "measured")
        return found


def plan_photos(
    channels: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[PlanningResult, SlowDevice, Path, list[dict[str, np.ndarray]]]:
    """Plan a model of photographs, with a package of it."""
    monkeypatch.setenv("EDGEKIT_HOME", str(folder))
    monkeypatch.setenv("EDGEKIT_CACHE", str(folder / "cache"))
    generate_key("default")
    content = narrowing_model(channels, SIDE)
    feeds = [{"t0": one["t0"][:, :channels]} for one in photos(SIDE, 4)]
    model = folder / "photo.onnx"
    model.write_bytes(content)
    package = write_plain_package(model, name="photo", target="x86-64", folder=folder, sign=load_signer())
    realise = SlowDevice(content, feeds)
    result = plan(replace(inputs_of(content, [3.0] * 3, [0.001] * 3, feeds), measure=realise, max_loss=1.0))
    return result, realise, package, feeds


@contextlib.contextmanager
def offloading(package: Path, port: int) -> Iterator[RemoteSession]:
    write_offload_options(OffloadOptions(f"127.0.0.1:{port}"))
    session: Any = open_session(package, trust=TrustStore.from_folder(package.parent.parent / "keys"))
    assert isinstance(session, RemoteSession)
    try:
        yield session
    finally:
        session.close()


@pytest.mark.parametrize("channels", [1, 3])
def test_photo_is_planned_packaged_served_and_answered_as_jpeg(
    channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result, realise, package, feeds = plan_photos(channels, tmp_path, monkeypatch)
    (tmp_path / "plans").mkdir()
    candidates = {candidate.name: candidate for candidate in result.candidates}
    assert candidates["jpeg:90"].plan.costs.is_measured
    assert candidates["jpeg:90"].plan.costs.upload_bytes < candidates["raw"].plan.costs.upload_bytes / 4
    assert any(one.media for one in result.table.plans)
    # JPEG and WebP are close here; which of them won is left to noise, so JPEG alone goes on.
    table = CutTable((candidates["local"].plan, candidates["jpeg:90"].plan))
    planned = attach(
        package, replace(result, table=table), realise.measured.splits, tmp_path / "plans", "default"
    )
    reference = onnxruntime.InferenceSession(tmp_path / "photo.onnx").run(None, feeds[0])[0]
    port = free_port()
    with serving(tmp_path, planned, "--port", port) as process:
        wait_ready(process)
        with offloading(planned, port) as session:
            assert session.wait_for_probe(60)
            wait_for(lambda: session.decision().plan.name == "jpeg:90", "the device to choose JPEG")
            answer = session.run(feeds[0])["t3"]
            wait_for(lambda: session.run(feeds[0]) and session.counts.remote > 0, "an answer of the server")
            assert session.counts.failed == 0
    # A smooth photograph at quality 90 is within a step or two of 128.
    np.testing.assert_allclose(answer, reference, atol=0.05 * float(np.abs(reference).max()))


def test_every_coded_upload_is_extracted_and_carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result, realise, package, _ = plan_photos(3, tmp_path, monkeypatch)
    uploads = [candidate.plan for candidate in result.candidates if candidate.kind == "upload"]
    assert {one.name for one in uploads} == {"raw", "uint8", "jpeg:90", "webp:80"}
    assert {candidate.label for candidate in result.candidates if candidate.kind == "upload"} == {"measured"}
    table = CutTable((result.candidates[0].plan, *uploads))
    (tmp_path / "plans").mkdir()
    planned = attach(
        package, replace(result, table=table), realise.measured.splits, tmp_path / "plans", "default"
    )
    session = open_session(planned, trust=TrustStore.from_folder(tmp_path / "keys"))
    session.close()  # without a server it is the plain session
    assert not isinstance(session, RemoteSession)
