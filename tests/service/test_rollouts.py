"""New versions on trial in a running service, with slots on the disk and real sessions."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import (
    Running,
    X,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    running,
)
from tests.service.wiring_parts import (
    LARGE,
    ask_many,
    changed,
    index,
    infer,
    load,
    metrics,
    served_version,
    statistics,
    unload,
    write,
)
from tests.waiting import wait_for

from edgekit_runtime.cli import main
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.slots import HEALTHY, UNPROVEN, Slots
from edgekit_runtime.tensors import TensorSpec

# Times of a loaded machine decide nothing here; what they do to a verdict is in test_canary_judge.
GATES = Gates(max_p50_ratio=0, max_p99_ratio=0, max_extra_errors=0.2, min_samples=50)
CANARY = ModelOptions(rollout="canary", canary=CanaryOptions(share=0.5), gates=GATES)
# Wide, so that few calls decide.
FEW_CALLS = dataclasses.replace(GATES, min_agreement=0.1, max_extra_errors=0.9, min_samples=20)
SHADOW = ModelOptions(
    rollout="shadow", gates=GATES, shadow=ShadowOptions(share=1.0, quiet_s=0.0005, max_wait_s=10)
)

Serve: TypeAlias = Callable[[Path, Slots, ModelOptions], Any]


@pytest.fixture
def slots(maker: PackageMaker, tmp_path: Path) -> Slots:
    """Slots with version 1.0.0, which has proved itself."""
    found = Slots(tmp_path / "state", maker.trust)
    found.install(write(maker, tmp_path, "1.0.0"))
    found.begin_start("linear").package.close()
    found.confirm("linear", "1.0.0")
    return found


IN_BOTH = pytest.mark.parametrize("serve", [None, True], ids=["inside", "isolated"], indirect=True)
"""What differs where the worker holds the trial. All else is decided by the same code in either process."""


@pytest.fixture(params=[None, pytest.param(True, marks=pytest.mark.long)], ids=["inside", "isolated"])
def serve(request: pytest.FixtureRequest) -> Serve:
    """Serves with and without a process of its own for the model."""

    def begin(folder: Path, slots: Slots, options: ModelOptions) -> Any:
        options = dataclasses.replace(options, isolated=request.param)
        return running(make_config(folder, models={"linear": options}), InstalledModels(slots))

    return begin


def install(maker: PackageMaker, folder: Path, slots: Slots, version: str = "2.0.0") -> None:
    slots.install(write(maker, folder, version))


@IN_BOTH
@pytest.mark.parametrize("options", [CANARY, SHADOW])
def test_good_version_is_tried_and_takes_over(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots, options: ModelOptions
) -> None:
    kind = options.rollout
    options = dataclasses.replace(options, gates=FEW_CALLS)
    with serve(tmp_path, slots, options) as service:
        install(maker, tmp_path, slots)
        assert load(service).status == 200
        assert served_version(service) == "1.0.0"
        assert [line[:3] for line in index(service)] == [
            ("linear", "1.0.0", "READY"),
            ("linear", "2.0.0", "READY"),
        ]
        assert kind in index(service)[1][3]
        assert statistics(service)["rollout"]["candidate_version"] == "2.0.0"
        assert statistics(service)["rollout"]["verdict"] == "continue"
        assert 'edgekit_rollout_answers{model="linear",version="2.0.0"}' in metrics(service)
        for y in ask_many(service, 1500, pause_s=0.002):
            np.testing.assert_array_equal(y, X @ WEIGHT)
            if service.call(lambda: service.service.registry.models.find("linear", None).version) == "2.0.0":
                break
        wait_for(lambda: served_version(service) == "2.0.0")
        assert [line[:3] for line in index(service)] == [("linear", "2.0.0", "READY")]
        assert 'edgekit_swaps_total{model="linear",outcome="promoted"} 1' in metrics(service)
        assert "rollout" not in statistics(service)
        assert ask(service, get_bytes("/v2/models/linear/versions/1.0.0/ready")).status == 404
    current = slots.load("linear").state.current
    assert current is not None
    assert (current.version, current.health) == ("2.0.0", HEALTHY)


def assert_rolled_back(service: Running, slots: Slots, gate: str) -> None:
    wait_for(lambda: slots.load("linear").state.rejected != ())
    (rejection,) = slots.load("linear").state.rejected
    assert (rejection.version, gate in rejection.reason) == ("2.0.0", True)
    current = slots.load("linear").state.current
    assert current is not None
    assert current.version == "1.0.0"
    lines = index(service)
    assert [line[:3] for line in lines] == [
        ("linear", "1.0.0", "READY"),
        ("linear", "2.0.0", "UNAVAILABLE"),
    ]
    assert gate in lines[1][3]
    assert 'edgekit_swaps_total{model="linear",outcome="rolled_back"} 1' in metrics(service)
    assert served_version(service) == "1.0.0"


@IN_BOTH
def test_canary_that_answers_nan_is_rolled_back_and_no_client_sees_it(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(changed(maker, limit=100.0), tmp_path, slots)
        assert load(service).status == 200
        for y in ask_many(service, 100, LARGE):
            np.testing.assert_array_equal(y, LARGE @ WEIGHT)
        assert_rolled_back(service, slots, "not_finite")
        install(changed(maker, limit=None), tmp_path, slots, "3.0.0")
        assert load(service).status == 200
        assert statistics(service)["rollout"]["candidate_version"] == "3.0.0"
        arguments = ["--state", str(slots.folder), "--keys", str(write_keys(tmp_path))]
        assert main(["status", *arguments, "--socket", service.socket_path, "--json"]) == 0
        (model,) = json.loads(capsys.readouterr().out)["models"]
        assert "not_finite" in model["rejected"][0]["reason"]
        lines = {(line["version"], line["state"]) for line in model["service"]}
        assert lines == {("1.0.0", "READY"), ("3.0.0", "READY"), ("2.0.0", "UNAVAILABLE")}
        assert main(["status", *arguments, "--socket", service.socket_path]) == 0
        assert "service  READY 3.0.0: canary with 50% of the calls" in capsys.readouterr().out
    assert main(["status", *arguments, "--socket", service.socket_path]) == 0
    assert "service  " not in capsys.readouterr().out


def write_keys(folder: Path) -> Path:
    keys = folder / "keys"
    keys.mkdir()
    public = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32).public_key()  # as make_signer(1) has it
    pem = public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (keys / "k.pub.pem").write_bytes(pem)
    return keys


def test_shadow_with_other_weights_is_rolled_back_by_disagreement(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, SHADOW) as service:
        install(changed(maker, -1.0), tmp_path, slots)
        assert load(service).status == 200
        for y in ask_many(service, 1500, pause_s=0.002):
            np.testing.assert_array_equal(y, X @ WEIGHT)
            if slots.load("linear").state.rejected:
                break
        assert_rolled_back(service, slots, "agreement")


def test_identical_shadow_of_a_short_model_is_as_fast_as_the_version_in_use(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    # By its place alone it took 9 times as long.
    gates = Gates(min_samples=10**9, max_p50_ratio=5.0, max_p99_ratio=0)
    options = dataclasses.replace(SHADOW, gates=gates)
    with serve(tmp_path, slots, options) as service:
        install(maker, tmp_path, slots)
        load(service)

        def is_compared() -> bool:  # in pauses, of which a busy machine has few
            list(ask_many(service, 50, pause_s=0.002))
            return statistics(service)["rollout"]["compared"] > 50

        wait_for(is_compared, "the comparisons")
    assert slots.load("linear").state.rejected == ()


def test_canary_with_wrong_answers_is_rolled_back_within_a_hundred_of_them(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    wrong = 0
    with serve(tmp_path, slots, CANARY) as service:
        install(changed(maker, -1.0), tmp_path, slots)
        assert load(service).status == 200
        assert "compared by agreement" in index(service)[1][3]
        for y in ask_many(service, 3000):
            wrong += not np.array_equal(y, X @ WEIGHT)
            if slots.load("linear").state.rejected:
                break
        assert_rolled_back(service, slots, "agreement")
    assert 0 < wrong <= 100


@pytest.mark.parametrize(
    ("figures", "guessed", "how"),
    [
        ({"class_output": "y"}, "false", "(the manifest says so: figures.class_output)"),
        ({}, "true", "(a guess: 'y' float32 ['N', 2] has the shape of class scores)"),
    ],
)
def test_shadow_says_how_answers_are_compared_and_whether_that_is_a_guess(
    serve: Serve,
    maker: PackageMaker,
    tmp_path: Path,
    slots: Slots,
    caplog: pytest.LogCaptureFixture,
    figures: dict[str, Any],
    guessed: str,
    how: str,
) -> None:
    with serve(tmp_path, slots, SHADOW) as service:
        slots.install(write(maker, tmp_path, "2.0.0", figures=figures))
        load(service)
        assert f"compared by agreement {how}" in index(service)[1][3]
        assert ("set shadow.comparison in [models.linear]" in caplog.text) is (guessed == "true")
        for _ in ask_many(service, 20, pause_s=0.002):
            pass
        labels = f'model="linear",version="2.0.0",comparison="agreement",guessed="{guessed}"'
        wait_for(lambda: f"edgekit_rollout_agreement_ratio{{{labels}}} 1" in metrics(service))
        assert statistics(service)["rollout"]["comparison"]["guessed"] is (guessed == "true")


def test_version_on_trial_can_be_asked_by_name(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(changed(maker, -1.0), tmp_path, slots)
        load(service)
        reply = ask(service, get_bytes("/v2/models/linear/versions/2.0.0/ready"))
        assert reply.status == 200
        reply = ask(service, infer_bytes(X, path="/v2/models/linear/versions/2.0.0/infer"))
        assert (reply.json["model_version"], reply.binary) == ("2.0.0", (-X @ WEIGHT).tobytes())
        assert ask(service, get_bytes("/v2/models/linear")).json["versions"] == ["1.0.0", "2.0.0"]


@IN_BOTH
def test_restart_in_the_middle_of_a_trial_goes_on_with_both_versions(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    install(maker, tmp_path, slots)
    for _ in range(2):
        with serve(tmp_path, slots, CANARY) as service:
            assert served_version(service) == "1.0.0"
            assert statistics(service)["rollout"]["candidate_version"] == "2.0.0"
        current = slots.load("linear").state.current
        assert current is not None
        # A start that counted would reject the version after some.
        assert (current.version, current.health, current.begun) == ("2.0.0", UNPROVEN, 0)


@pytest.mark.parametrize("trial", ["shadow", pytest.param("canary", marks=pytest.mark.long)])
def test_trial_that_an_installation_asked_for_survives_a_restart(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots, trial: str
) -> None:
    slots.install(write(maker, tmp_path, "2.0.0"), trial=trial)
    for _ in range(2):
        with serve(tmp_path, slots, ModelOptions()) as service:
            assert served_version(service) == "1.0.0"
            assert trial in index(service)[1][3]
    slots.confirm("linear", "2.0.0")
    with serve(tmp_path, slots, ModelOptions()) as service:
        assert [line[:3] for line in index(service)] == [("linear", "2.0.0", "READY")]


def test_restart_in_the_middle_of_a_trial_does_not_follow_a_link_to_the_proven_version(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    install(maker, tmp_path, slots)
    ((_, path),) = [pair for pair in slots.list_candidates("linear") if pair[0].health == HEALTHY]
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    with serve(tmp_path, slots, CANARY) as service:
        assert served_version(service) == "2.0.0"


def test_load_while_a_trial_runs_changes_nothing(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(maker, tmp_path, slots)
        load(service)
        list(ask_many(service, 20))
        # A process of its own tells once a second.
        wait_for(lambda: statistics(service)["rollout"]["candidate"]["answers"] > 0)
        assert load(service).status == 200
        assert statistics(service)["rollout"]["candidate"]["answers"] > 0


def test_newer_version_replaces_the_one_on_trial(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(changed(maker, -1.0), tmp_path, slots)
        load(service)
        install(maker, tmp_path, slots, "3.0.0")
        assert load(service).status == 200
        assert statistics(service)["rollout"]["candidate_version"] == "3.0.0"
        assert [line[1] for line in index(service)] == ["1.0.0", "3.0.0"]


def test_rollback_by_hand_during_a_trial_ends_it(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(maker, tmp_path, slots)
        load(service)
        slots.rollback("linear")
        assert load(service).status == 200
        assert served_version(service) == "1.0.0"
        assert "rollout" not in statistics(service)


@IN_BOTH
def test_unloading_during_a_trial_frees_both(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    with serve(tmp_path, slots, CANARY) as service:
        install(maker, tmp_path, slots)
        load(service)
        assert unload(service).status == 200
        assert infer(service).status == 503
        assert load(service).status == 200
        assert served_version(service) == "1.0.0"


def test_version_with_other_inputs_is_refused_and_the_old_one_serves(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    fixed = changed(maker, batch=1)
    with serve(tmp_path, slots, CANARY) as service:
        path = tmp_path / "linear-2.0.0.edgepkg"
        specs = {
            "inputs": (TensorSpec("x", "float32", (1, 4)),),
            "outputs": (TensorSpec("y", "float32", (1, 2)),),
        }
        fixed.write(path, version="2.0.0", **specs)
        slots.install(path)
        reply = load(service)
        assert (reply.status, "rollout = 'swap'" in reply.json["error"]) == (400, True)
        assert served_version(service) == "1.0.0"


def test_candidate_that_fails_its_self_test_is_said_and_nothing_is_tried(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    wrong = dataclasses.replace(maker, artifacts={**maker.artifacts, "golden/y.bin": bytes(8)})
    with serve(tmp_path, slots, CANARY) as service:
        install(wrong, tmp_path, slots)
        assert load(service).status == 200
        assert [line[1:3] for line in index(service)] == [("1.0.0", "READY"), ("2.0.0", "UNAVAILABLE")]
        assert "rollout" not in statistics(service)


def test_time_that_is_over_settles_a_trial_without_traffic(
    serve: Serve, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    gates = Gates(max_duration_s=0.3)
    options = ModelOptions(rollout="canary", gates=gates)
    with serve(tmp_path, slots, options) as service:
        install(maker, tmp_path, slots)
        load(service)
        service.call(service.service.watch)
        assert_rolled_back(service, slots, "samples")


def test_packages_in_a_folder_are_tried_and_a_rejected_file_is_passed_by(
    maker: PackageMaker, tmp_path: Path
) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    write(maker, folder, "1.0.0")
    config = make_config(tmp_path, models={"linear": CANARY})
    with running(config, PackageFiles([folder], maker.trust)) as service:
        write(changed(maker, limit=100.0), folder, "2.0.0")
        load(service)
        list(ask_many(service, 100, LARGE))
        wait_for(lambda: "rollout" not in statistics(service))
        assert load(service).status == 200
        assert "rollout" not in statistics(service)
        assert served_version(service) == "1.0.0"
