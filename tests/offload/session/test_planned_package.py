"""Planned packages against a real service with their tails: every plan answers as the whole model does."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.offload.session.offload_parts import set_server, wait_until
from tests.offload.session.planned_package import MARGIN, Array, make_pictures, serving, write_planned
from tests.waiting import SHARED_S

from edgekit_runtime.cli import main
from edgekit_runtime.client.client import Client
from edgekit_runtime.errors import UnavailableError
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.trust.trust_store import TrustStore

# What each plan may differ from the whole model; logits are about 1. Exact codings differ where the engine
# fuses or blocks sums differently; int8 loses half a step of 255 in a tensor; JPEG is lossy.
TOLERANCES = {"raw": 1e-5, "cut5": 1e-5, "uint8": 1e-5, "cut3-int8": 0.02, "jpeg": 0.05, "cascade": 1e-5}


@dataclass(frozen=True)
class Planned:
    folder: Path
    package: Path
    server: str

    def open(self, package: Path | None = None) -> Session:
        return open_session(package or self.package, trust=TrustStore.from_folder(self.folder / "keys"))

    @contextlib.contextmanager
    def offloading(self, package: Path | None = None) -> Iterator[RemoteSession]:
        session = self.open(package)
        assert isinstance(session, RemoteSession)
        try:
            yield session
        finally:
            session.close()


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planned]:
    folder = tmp_path_factory.mktemp("p")
    package = write_planned(folder)
    with serving(folder, folder, "--tails", package, limit_s=SHARED_S) as server:
        yield Planned(folder, package, server)


@pytest.fixture(scope="module")
def expected(planned: Planned) -> dict[int, Array]:
    """Number of rows -> answers of the whole model, which runs here."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setenv("EDGEKIT_HOME", str(planned.folder / "none"))
    session = planned.open()
    assert not isinstance(session, RemoteSession)
    found = {rows: session.run({"image": make_pictures(rows)})["logits"] for rows in (1, 7)}
    session.close()
    monkeypatch.undo()
    return found


@pytest.mark.parametrize("plan", TOLERANCES)
def test_plan_gives_the_answers_of_the_whole_model(
    planned: Planned,
    expected: dict[int, Array],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    plan: str,
) -> None:
    if plan == "jpeg":
        pytest.importorskip("PIL", reason="pillow is not installed")
    set_server(tmp_path, monkeypatch, planned.server, plan=plan)
    with planned.offloading() as session:
        wait_until(lambda: session.decision().plan.name == plan, f"{plan} is not used")
        assert session.decision().reason == f"{plan} was asked for by name"
        for rows in (1, 7) if plan != "jpeg" else (1,):
            found = session.run({"image": make_pictures(rows)})["logits"]
            np.testing.assert_allclose(found, expected[rows], rtol=0, atol=TOLERANCES[plan])
        assert session.counts.failed + session.counts.hedged == 0
        assert session.counts.remote > 0 or plan == "cascade"


def test_cascade_sends_only_what_its_head_is_not_sure_of(
    planned: Planned, expected: dict[int, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_server(tmp_path, monkeypatch, planned.server, plan="cascade")
    ordered = np.sort(expected[7], axis=1)
    sure = int((ordered[:, -1] - ordered[:, -2] >= MARGIN).sum())
    assert 0 < sure < 7
    with planned.offloading() as session:
        wait_until(lambda: session.decision().plan.name == "cascade", "the cascade is not used")
        for picture, logits in zip(make_pictures(7), expected[7], strict=True):
            np.testing.assert_allclose(session.run({"image": picture[None]})["logits"][0], logits, atol=1e-5)
        assert (session.counts.local, session.counts.remote) == (sure, 7 - sure)


def test_several_rows_do_not_end_a_plan_of_one_file(
    planned: Planned, expected: dict[int, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("PIL", reason="pillow is not installed")
    set_server(tmp_path, monkeypatch, planned.server, plan="jpeg")
    with planned.offloading() as session:
        wait_until(lambda: session.decision().plan.name == "jpeg", "jpeg is not used")
        np.testing.assert_allclose(
            session.run({"image": make_pictures(7)})["logits"], expected[7], rtol=0, atol=1e-5
        )
        assert session.counts.local == 1
        assert session.decision().plan.name == "jpeg"


def test_plan_that_the_package_lacks_leaves_all_local_and_says_so(
    planned: Planned, expected: dict[int, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_server(tmp_path, monkeypatch, planned.server, plan="cut99")
    with planned.offloading() as session:
        np.testing.assert_array_equal(session.run({"image": make_pictures(1)})["logits"], expected[1])
        assert session.decision().reason.startswith("the package has no plan 'cut99'")


def test_model_too_large_for_the_device_answers_through_the_server_or_says_why_not(
    planned: Planned, expected: dict[int, Array], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = write_planned(planned.folder, is_whole=False)
    set_server(tmp_path, monkeypatch, planned.server)
    with planned.offloading(package) as session:
        assert session.local is None
        for _ in range(3):  # the first ones do not wait for a probe
            found = session.run({"image": make_pictures(1)})["logits"]
            np.testing.assert_allclose(found, expected[1], rtol=0, atol=TOLERANCES["jpeg"])
    set_server(tmp_path, monkeypatch, "127.0.0.1:9", timeout_s=0.5)
    with planned.offloading(package) as session, pytest.raises(UnavailableError, match="cannot reach"):
        session.run({"image": make_pictures(1)})


def test_service_offloads_behind_an_unchanged_application_and_status_says_so(
    planned: Planned,
    expected: dict[int, Array],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    set_server(tmp_path, monkeypatch, planned.server)

    def find_status() -> dict[str, object]:
        assert main(["offload", "status", "--json"]) == 0
        sessions = json.loads(capsys.readouterr().out)["sessions"]
        return dict(sessions[0]) if sessions else {"plan": "local", "counts": {"remote": 0}}

    with (
        serving(tmp_path, planned.folder, "--package", planned.package) as address,
        Client(address) as application,
    ):

        def is_offloaded() -> bool:
            found = application.infer("pictures", {"image": make_pictures(1)})["logits"]
            np.testing.assert_allclose(found, expected[1], rtol=0, atol=TOLERANCES["jpeg"])
            status = find_status()
            return status["plan"] != "local" and status["counts"]["remote"] > 0  # type: ignore[index]

        wait_until(is_offloaded, "the service does not offload")
        assert "Mbit/s" in str(find_status()["reason"])
        main(["offload", "status"])
        first, link, counts, *_ = capsys.readouterr().out.splitlines()
        assert first.startswith("pictures (process ")
        assert f" with {planned.server}: the link has " in first
        assert link.startswith("  link: ")
        assert "with the server" in counts
    assert find_status()["plan"] == "local"
