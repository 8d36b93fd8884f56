"""Pipelines in a service: one model with one version, which is answered, tried and rolled back as one."""

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import draw, encode, exchange, post
from tests.service.pipeline_parts import (
    DETECTOR,
    SHADE,
    write_members,
    write_pipeline,
    write_sound_classifier,
)
from tests.service.service_parts import Running, make_config, running
from tests.service.wiring_parts import index, load

from edgekit_runtime.package.pipeline import Stage
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates
from edgekit_runtime.slots import Slots

PATH = "/v2/models/street/answer"
PICTURE = encode(draw(red=(0, 0), green=(2, 2)), "JPEG", quality=95)
# Times of a loaded machine decide nothing here.
GATES = Gates(max_p50_ratio=0, max_p99_ratio=0, max_extra_errors=0.5, min_samples=20, min_agreement=0.5)
CANARY = ModelOptions(rollout="canary", canary=CanaryOptions(share=0.5, compared_share=1.0), gates=GATES)


def ask(service: Running, picture: bytes = PICTURE) -> Any:
    status, answer = post(service, picture, "image/jpeg", path=PATH)
    assert status == 200, answer
    return answer


def shades(answer: Any) -> set[tuple[str, str]]:
    return {(entry["label"], entry["shade"]["classes"][0]["label"]) for entry in answer["detections"]}


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.long)], ids=["inside", "isolated"])
def street(request: pytest.FixtureRequest, maker: PackageMaker, tmp_path: Path) -> Iterator[Running]:
    path = write_pipeline(maker, tmp_path)
    config = make_config(tmp_path, models={"street": ModelOptions(isolated=request.param)})
    with running(config, PackageFiles([path], maker.trust)) as service:
        yield service


@pytest.mark.parametrize("street", [False, True], ids=["inside", "isolated"], indirect=True)
def test_photograph_is_answered_by_all_stages(street: Running) -> None:
    answer = ask(street)
    assert shades(answer) == {("red", "red"), ("green", "green")}
    assert (answer["model_name"], answer["model_version"]) == ("street", "1.0.0")
    assert ask(street, encode(draw(), "JPEG"))["detections"] == []


def test_standard_protocol_gives_the_answer_as_for_one_model(street: Running) -> None:
    entry = {
        "name": "image",
        "datatype": "UINT8",
        "shape": [len(PICTURE)],
        "parameters": {"binary_data_size": len(PICTURE), "content_type": "image/jpeg"},
    }
    document = json.dumps({"inputs": [entry], "outputs": [{"name": "answer"}]}).encode()
    fields = {"Inference-Header-Content-Length": str(len(document))}
    status, _, body = exchange(street, "POST", "/v2/models/street/infer", document + PICTURE, fields)
    assert status == 200, body
    (output,) = json.loads(body)["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("answer", "BYTES", [1])
    assert shades(json.loads(output["data"][0])) == {("red", "red"), ("green", "green")}


def test_sound_and_options_are_refused_with_a_reason(street: Running) -> None:
    status, answer = post(street, b"\0" * 8, "audio/x-raw; rate=16000", path=PATH)
    assert (status, "takes a picture" in answer["error"]) == (415, True)
    status, answer = post(street, PICTURE, "image/jpeg", path=f"{PATH}?min_score=0.5")
    assert (status, "min_score" in answer["error"]) == (400, True)


def test_sound_is_answered_by_an_ensemble(maker: PackageMaker, tmp_path: Path) -> None:
    members = {name: tmp_path / f"{name}.edgepkg" for name in ("first", "second")}
    for path in members.values():
        write_sound_classifier(maker, path)
    stages = [
        *(Stage(name=name) for name in members),
        Stage(name="both", ensemble="mean", stages=tuple(members)),
    ]
    path = write_pipeline(maker, tmp_path, stages, members, output=["both"])
    sound = np.repeat(np.float32([0.25, 0.75]), 8)
    with running(make_config(tmp_path), PackageFiles([path], maker.trust)) as service:
        kind = "audio/x-raw; format=F32LE; rate={}"
        status, answer = post(service, sound.tobytes(), kind.format(8000), path=PATH)
        assert (status, [(e["label"], e["score"]) for e in answer["classes"]]) == (
            200,
            [("late", 0.75), ("early", 0.25)],
        )
        assert post(service, sound.tobytes(), kind.format(16000), path=PATH)[0] == 400
        assert post(service, PICTURE, "image/jpeg", path=PATH)[0] == 415


def test_failing_stage_is_named_to_the_client(maker: PackageMaker, tmp_path: Path) -> None:
    path = write_pipeline(maker, tmp_path)
    config = make_config(tmp_path, models={"street": ModelOptions(isolated=False)})
    with running(config, PackageFiles([path], maker.trust)) as service:
        (session,) = service.service.registry.models.find("street", None).loaded.instances
        session.sessions["shade"].close()  # type: ignore[attr-defined]  # of a pipeline
        status, answer = post(service, PICTURE, "image/jpeg", path=PATH)
        assert (status, "stage 'shade'" in answer["error"]) == (500, True), answer


@pytest.fixture
def slots(maker: PackageMaker, tmp_path: Path) -> Slots:
    """Slots with version 1.0.0, which has proved itself."""
    slots = Slots(tmp_path / "state", maker.trust)
    slots.install(write_pipeline(maker, tmp_path))
    slots.begin_start("street").package.close()
    slots.confirm("street", "1.0.0")
    return slots


@pytest.fixture(params=[False, True], ids=["inside", "isolated"])
def on_trial(request: pytest.FixtureRequest, tmp_path: Path, slots: Slots) -> Iterator[Running]:
    options = dataclasses.replace(CANARY, isolated=request.param)
    config = make_config(tmp_path, models={"street": options})
    with running(config, InstalledModels(slots)) as service:
        yield service


def ask_until(service: Running, is_over: Callable[[], bool]) -> None:
    def ask_once() -> bool:
        time.sleep(0.005)  # a trial in a worker is judged once a second
        return bool(ask(service) and is_over())

    assert any(ask_once() for _ in range(3000))


def test_canary_that_changes_one_member_is_promoted_as_a_whole(
    on_trial: Running, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    members = write_members(maker, tmp_path, factors=(0.9, 0.9))
    slots.install(write_pipeline(maker, tmp_path, members=members, version="2.0.0"))
    assert load(on_trial, "street").status == 200
    assert "compared by agreement (the manifest says so: figures.answer_output)" in index(on_trial)[1][3]
    ask_until(on_trial, lambda: [line[:3] for line in index(on_trial)] == [("street", "2.0.0", "READY")])
    answer = ask(on_trial)
    assert answer["model_version"] == "2.0.0"
    assert answer["detections"][0]["shade"]["classes"][0]["score"] < 0.95


def test_canary_with_one_wrong_member_is_rolled_back_as_a_whole(
    on_trial: Running, maker: PackageMaker, tmp_path: Path, slots: Slots
) -> None:
    members = write_members(maker, tmp_path, factors=(-1.0, -1.0))
    slots.install(write_pipeline(maker, tmp_path, members=members, version="2.0.0"))
    assert load(on_trial, "street").status == 200
    ask_until(on_trial, lambda: slots.load("street").state.rejected != ())
    (rejection,) = slots.load("street").state.rejected
    assert (rejection.version, "agreement" in rejection.reason) == ("2.0.0", True)
    answer = ask(on_trial)
    assert (answer["model_version"], shades(answer)) == ("1.0.0", {("red", "red"), ("green", "green")})


def test_rollback_switches_all_members(maker: PackageMaker, tmp_path: Path, slots: Slots) -> None:
    other = [dataclasses.replace(DETECTOR), dataclasses.replace(SHADE, max_crops=1)]
    slots.install(write_pipeline(maker, tmp_path, other, version="2.0.0"))
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert sum("shade" in entry for entry in ask(service)["detections"]) == 1
    slots.rollback("street")
    with running(make_config(tmp_path), InstalledModels(slots)) as service:
        assert sum("shade" in entry for entry in ask(service)["detections"]) == 2
