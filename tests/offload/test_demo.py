"""The demo: all its phases happen, no process is left, and its pages show what was recorded."""

import http.client
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray
from tests.offload.onnx_models import model_of
from tests.offload.planning_sample import BANDWIDTHS, sample
from tests.offload.test_plan_page import body_of, section_of, text_of
from tests.runtime.conftest import WEIGHT, PackageMaker, maker  # noqa: F401  # a fixture
from tests.runtime.slot_cases import write_keys
from tests.service.tail_parts import Part, write_split

from edgekit_cli.offload.demo import command as demo
from edgekit_offload.demo.demo_model import INPUT, OUTPUT, make_images, make_model, pick_images, run_model
from edgekit_offload.demo.demo_package import choose_plans
from edgekit_offload.demo.demo_page import render_live_page, render_saved_page, summarize
from edgekit_offload.demo.director import PHASES, DemoSetup, run_demo
from edgekit_offload.demo.live_server import LiveServer
from edgekit_offload.demo.recording import EDGEKIT, Phase, PhaseTimes, Recording, Request
from edgekit_offload.export.service_config import service_config
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import OutputError
from edgekit_runtime.offload.cut_table import CUT_TABLE_ROLE, CutTable
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.manifest import BackendChoice, Manifest

SHORT_S = 4.0


def recorded() -> Recording:
    """Three phases: fast link, slow link, killed server; a switch at the start of the last two."""
    begun, requests = [], []
    phases = [
        Phase("fast <b>", "link", 20.0, 20.0, 0.3),
        Phase("slow", "link", 2.0, 20.0, 0.3),
        Phase("killed", "kill", 20.0, 20.0, 0.4),
    ]
    latencies = {"local": (0.1, 0.1, 0.1), "jpeg:90": (0.05, 0.2, math.inf)}
    chosen = ("jpeg:90", "local", "local")
    for number, phase in enumerate(phases):
        begun.append(PhaseTimes(phase, 10.0 * number, 10.0 * (number + 1)))
        for step in range(10):
            at_s = 10.0 * number + step
            plan = chosen[number]
            requests.append(
                Request(
                    at_s=at_s,
                    policy=EDGEKIT,
                    plan=plan,
                    latency_s=latencies[plan][number],
                    is_right=True,
                    reason="the link <slowed>",
                )
            )
            for candidate, values in latencies.items():
                latency_s = values[number]
                requests.append(
                    Request(
                        at_s=at_s + 0.5,
                        policy=candidate,
                        plan=candidate,
                        latency_s=latency_s,
                        is_right=math.isfinite(latency_s),
                    )
                )
    return Recording(
        model="model </script>",
        machine="machine",
        label="emulated: test",
        plans=("local", "jpeg:90"),
        begun=tuple(begun),
        requests=tuple(requests),
        is_over=True,
    )


def test_oracle_is_the_best_way_of_each_phase() -> None:
    recording = recorded()

    assert [recording.oracle(one) for one in recording.begun] == [
        ("jpeg:90", 0.05),
        ("local", 0.1),
        ("local", 0.1),
    ]
    assert recording.mean_to_oracle() == pytest.approx(1.0)
    assert recording.wrong == 0


def test_phase_in_which_no_way_answers_has_no_oracle() -> None:
    plain = recorded()
    lost = tuple(replace(one, latency_s=math.inf) if one.policy != EDGEKIT else one for one in plain.requests)
    recording = replace(plain, requests=lost)

    assert recording.oracle(recording.begun[0]) is None
    assert recording.mean_to_oracle() is None


def test_wrong_and_missing_answers_are_counted_and_said() -> None:
    plain = recorded()
    bad = (
        Request(at_s=5.1, policy=EDGEKIT, plan="local", latency_s=0.1, is_right=False),
        Request(at_s=5.2, policy=EDGEKIT, plan="", latency_s=math.inf, is_right=False),
    )
    recording = replace(plain, requests=bad, is_over=False)

    assert recording.wrong == 2
    assert "0 of 2 answers were right" in " ".join(summarize(recording))


def test_headline_speaks_only_of_phases_in_which_requests_were_made() -> None:
    plain = recorded()
    last = plain.begun[-1].begin_s
    short = replace(plain, requests=tuple(request for request in plain.requests if request.at_s < last))

    assert "under load and without the server too." in " ".join(summarize(plain))
    assert "20 of 20 answers were right; no request was made in: killed." in summarize(short)
    assert "in each phase so far." in " ".join(summarize(replace(plain, is_over=False)))


def test_single_answer_of_a_way_in_a_phase_stands_in_the_table() -> None:
    plain = recorded()
    last = plain.begun[-1].begin_s
    kept = tuple(one for one in plain.requests if one.policy == EDGEKIT or one.at_s < last)
    recording = replace(
        plain,
        requests=(
            *kept,
            Request(at_s=last + 0.5, policy="local", plan="local", latency_s=0.321, is_right=True),
        ),
    )

    assert "321 ms (1)" in text_of(section_of(body_of(render_saved_page(recording)), "phases"))


def test_phase_in_which_a_way_had_no_request_is_left_out_of_the_comparison() -> None:
    plain = recorded()
    last = plain.begun[-1].begin_s
    slower = tuple(one for one in plain.requests if one.policy != "local" or one.at_s < last)
    recording = replace(plain, requests=slower)
    first = summarize(recording)[0]
    assert recording.oracle(recording.begun[-1]) is None
    assert recording.mean_to_oracle() == pytest.approx(1.0)
    assert "of 20 requests in 2 of 3 phases; in 1 a plan had no request" in first
    assert "no request" in text_of(section_of(body_of(render_saved_page(recording)), "phases"))
    assert "of 30 requests in 3 of 3 phases." in summarize(plain)[0]


def test_page_that_cannot_be_written_is_said_before_the_demo_begins(tmp_path: Path) -> None:
    for output, words in ((tmp_path, "is a folder"), (tmp_path / "none" / "demo.html", "make its folder")):
        result = CliRunner().invoke(demo, ["--no-browser", "-o", str(output)])
        assert isinstance(result.exception, OutputError)
        assert words in str(result.exception)


def test_switches_are_listed_with_their_reasons() -> None:
    switches = list(recorded().switches())

    assert [(one.at_s, one.before, one.after) for one in switches] == [(10.0, "jpeg:90", "local")]
    shown = text_of(section_of(body_of(render_saved_page(recorded())), "switches"))
    assert "10.0 s" in shown
    assert "the link <slowed>" in shown


def test_saved_page_has_no_script_and_escapes_names() -> None:
    html = render_saved_page(recorded())

    assert "<script" not in html
    assert "model </script>" in text_of(body_of(html))
    assert "no answer" in text_of(section_of(body_of(html), "phases"))


@pytest.mark.parametrize("begun", [(), (PhaseTimes(PHASES[0], 0.0, 0.0),)])
def test_page_before_the_first_request_is_well_formed(begun: tuple[PhaseTimes, ...]) -> None:
    empty = Recording(
        model="model", machine="machine", label="emulated", plans=("local",), begun=begun, requests=()
    )

    assert "No request was answered yet" in text_of(body_of(render_saved_page(empty)))
    assert render_live_page(empty).count("<script>") == 1


def test_live_server_shows_the_newest_state_to_its_own_name_alone() -> None:
    with LiveServer(recorded) as live:
        state, status = fetch(f"{live.url}state", live.url)
        assert status == (200, "over")
        assert b"model &lt;/script&gt;" in state
        assert b"connect-src" in fetch(live.url, live.url)[0]
        assert fetch(f"{live.url}state", "http://evil.test/")[1][0] == 404
        assert fetch(f"{live.url}other", live.url)[1][0] == 404


def fetch(url: str, named: str) -> tuple[bytes, tuple[int, str | None]]:
    """Ask as a browser does for which the server has the name in `named`."""
    where, named_as = urlsplit(url), urlsplit(named)
    connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=10)
    try:
        connection.request("GET", where.path, headers={"Host": named_as.netloc})
        response = connection.getresponse()
        return response.read(), (response.status, response.getheader("X-Demo"))
    finally:
        connection.close()


def test_model_of_the_demo_tells_its_images_apart() -> None:
    images = make_images(5)
    model = make_model(images[:2])
    picked = pick_images(model, images, 4)
    scores = run_model(model, picked)

    assert picked.dtype == np.uint8
    assert len(set(scores.argmax(axis=1).tolist())) >= 3
    assert make_model(images[:2]) == model
    assert (INPUT, OUTPUT) == ("image", "scores")


class OffloadMaker(PackageMaker):
    """Makes packages whose backend is `offload`."""

    def manifest(self, artifacts: Mapping[str, bytes] | None = None, **changes: Any) -> Manifest:
        plain = super().manifest(artifacts, **changes)
        local = plain.backend
        return replace(plain, backend=BackendChoice("offload", local.artifact, local.options, local))


def make_setup(plain: PackageMaker, folder: Path, *, weight: NDArray[np.float32] = WEIGHT) -> DemoSetup:
    """Return a demo of the linear model, which is uploaded whole to a server that computes with `weight`.

    By the table the device takes an hour. Runs teach it at most a hundredth of that, so no timing decides:
    what the server may answer goes there.
    """
    artifacts, roles = dict(plain.artifacts), dict(plain.roles)
    maker = OffloadMaker(plain.signer, plain.trust, artifacts, roles)  # noqa: F811
    x = np.array([[0.0, 1.0, 2.0, 3.0]], np.float32)
    served = model_of([("MatMul", ["x", "w"], ["y"])], {"x": ("N", 4)}, ["y"], weights={"w": weight})
    part = Part("whole.tail", served, {"x": x}, {"y": (x @ WEIGHT)})
    path = folder / "demo.edgepkg"
    (tail,) = write_split(maker, path, part)
    plans = (
        OffloadPlan("local", PlanCosts(3600.0)),
        OffloadPlan("raw", PlanCosts(0.0, 0.001, 16.0, 8.0), tail=tail),
    )
    maker.artifacts["cut-table.json"] = json.dumps(to_plain(CutTable(plans))).encode()
    maker.roles["cut-table.json"] = CUT_TABLE_ROLE
    write_split(maker, path, part)
    rows = np.array([[0, 1, 2, 3], [-1, 0, 0, -1], [3, 1, -5, 0]], np.float32)
    requests = folder / "requests.npz"
    np.savez(requests, x=rows, classes=(rows @ WEIGHT).argmax(axis=1))
    home = folder / "home"
    home.mkdir()
    write_keys(home / "keys")

    def serve(host: str, port: int) -> list[str]:
        config = folder / "serve.toml"
        config.write_text(service_config([tail], {"unix_socket": "", "host": host, "port": port}, devices=8))
        options = ["--config", str(config), "--tails", str(path), "--keys", str(home / "keys")]
        return [sys.executable, "-m", "edgekit_runtime.cli", "serve", *options]

    return DemoSetup(
        folder=folder,
        package=path,
        home=home,
        serve=serve,
        scheme="http",
        token_file="",
        ca_file="",
        plans=("local", "raw"),
        requests=requests,
        output="y",
        model="linear",
    )


def test_every_phase_happens_without_a_wrong_answer_and_no_process_is_left(
    maker: PackageMaker,  # noqa: F811
    tmp_path: Path,
) -> None:
    states: list[Recording] = []
    before = children()
    recording = run_demo(
        make_setup(maker, tmp_path),
        seconds=SHORT_S,
        kind="proxy",
        on_change=states.append,
        device_share=None,
    )

    assert [one.phase for one in recording.begun] == list(PHASES)
    assert recording.is_over
    assert recording.wrong == 0
    for phase in recording.begun:
        assert len(recording.within(phase, EDGEKIT)) >= 3
        assert len(recording.within(phase, "local")) >= 1
    *alive, killed = recording.begun
    for phase in alive:  # the last one may be under way when the server is killed
        assert all(math.isfinite(one) for one in recording.within(phase, "raw")[:-1])
    assert not any(math.isfinite(one) for one in recording.within(killed, "raw")[1:])
    for phase in (recording.begun[0], recording.begun[2]):
        assert count_offloaded(recording, phase) > 0
    assert count_offloaded(recording, killed) <= 1
    assert {one.plan for one in recording.own} == {"local", "raw"}
    assert all(one.reason for one in recording.own)
    assert len(states) > len(PHASES)
    assert children() == before


def count_offloaded(recording: Recording, phase: PhaseTimes) -> int:
    """Return how many of edgekit's answers in a phase came from the server."""
    return sum(one.plan == "raw" and phase.begin_s <= one.at_s < phase.end_s for one in recording.own)


def test_server_that_answers_wrongly_after_its_proof_makes_answers_of_the_recording_wrong(
    maker: PackageMaker,  # noqa: F811
    tmp_path: Path,
) -> None:
    # The first number of the golden input is 0, so the proof does not show that its weights are others.
    weight = WEIGHT + np.array([[-1000, 1000], [0, 0], [0, 0], [0, 0]], np.float32)
    setup = make_setup(maker, tmp_path, weight=weight)
    with np.load(setup.requests) as stored:
        assert ((stored["x"] @ weight).argmax(axis=1) != stored["classes"]).any()
    recording = run_demo(
        setup, seconds=SHORT_S * 3 / 4, kind="proxy", on_change=lambda _: None, device_share=None
    )

    assert recording.wrong > 0
    assert {one.plan for one in recording.own if not one.is_right} == {"raw"}


def children() -> set[int]:
    """Return the processes whose parent is this one."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(path.parent.name))
    return found


def test_demo_carries_no_way_that_the_plan_does_not_offer() -> None:
    plain = replace(sample(), bandwidths_mbit_s=(1.0, 1.26, 1.58, 2.0, *BANDWIDTHS[4:]))
    candidates = tuple(
        replace(candidate, is_over_loss=candidate.name == "cut3-int8") for candidate in plain.candidates
    )
    assert [candidate.name for candidate in choose_plans(plain)] == ["local", "jpeg:90", "cut3-int8"]
    assert [candidate.name for candidate in choose_plans(replace(plain, candidates=candidates))] == [
        "local",
        "jpeg:90",
        "cut5-int4",
    ]


@pytest.mark.long
def test_demo_as_a_user_starts_it_answers_right_and_explains_itself(tmp_path: Path) -> None:
    page = tmp_path / "demo.html"
    command = ["offload", "demo", "--proxy", "--seconds", "20", "--no-browser", "--json", "-o", str(page)]
    found = subprocess.run(
        [sys.executable, "-m", "edgekit_cli", *command],
        check=False,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stderr
    measured = json.loads(found.stdout)
    own = [one for one in measured["requests"] if one["policy"] == EDGEKIT]
    assert [one["phase"]["title"] for one in measured["begun"]] == [phase.title for phase in PHASES]
    assert own
    assert all(one["is_right"] and one["reason"] for one in own)
    assert all(one["reason"] for one in measured["switches"])
    assert "<script" not in page.read_text()
