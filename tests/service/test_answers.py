"""Photographs in, boxes out: `POST /v2/models/NAME/answer` against a real service."""

import functools
import io
import json
import queue
import signal
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from PIL import Image
from tests.runtime.conftest import PackageMaker
from tests.service.answer_parts import (
    DETECTION,
    LETTERBOX,
    draw,
    encode,
    exchange,
    post,
    write_cell_detector,
)
from tests.service.service_parts import Manifest_, Running, ask, get_bytes, make_config, running, write_model
from tests.service.wiring_parts import load
from tests.service.worker_parts import kill
from tests.waiting import wait_for

from edgekit_runtime.errors import OverloadedError, RequestError
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.service.answers.answer_path import Answered, AnswerRequest
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.oip.codec import classify
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.resources import MediaLimits
from edgekit_runtime.slots import Slots


@pytest.fixture(scope="module")
def cells(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("cells")
    write_cell_detector(maker, folder / "cells.edgepkg")
    config = make_config(folder, media=MediaLimits(max_pixels=1 << 20))
    with running(config, PackageFiles([folder / "cells.edgepkg"], maker.trust)) as service:
        yield service


def boxes(answer: dict[str, list[dict[str, object]]]) -> dict[object, object]:
    return {entry["label"]: entry["box"] for entry in answer["detections"]}


@pytest.mark.parametrize(
    ("form", "kind"), [("PNG", "png"), ("JPEG", "jpeg"), ("WEBP", "webp"), ("BMP", "bmp")]
)
def test_answer_has_boxes_in_pixels_of_the_picture(cells: Running, form: str, kind: str) -> None:
    picture = draw(256, 128, red=(1, 0), green=(3, 1))  # the letterbox leaves the lower half empty
    status, answer = post(cells, encode(picture, form), f"image/{kind}")
    assert status == 200
    assert answer["model_name"] == "cells"
    assert answer["model_version"] == "1.0.0"
    assert boxes(answer) == {"red": [64, 0, 128, 64], "green": [192, 64, 256, 128]}
    assert min(answer["times_ms"].values()) >= 0


def test_free_model_prepares_runs_and_decodes_on_one_thread(maker: PackageMaker, tmp_path: Path) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg")
    scheduling = SchedulingLimits(short_s=0.0)  # never on the loop
    options = ModelOptions(scheduling=scheduling, drift=False, isolated=False)
    config = make_config(tmp_path, models={"cells": options})
    picture = encode(draw(256, 128, red=(1, 0)), "PNG")
    with running(config, PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        answers = [post(service, data) for data in (picture, b"no picture", picture)]
        stats = ask(service, get_bytes("/v2/models/stats")).json["model_stats"][0]
    assert [status for status, _ in answers] == [200, 400, 200]
    assert boxes(answers[0][1]) == boxes(answers[2][1]) == {"red": [64, 0, 128, 64]}
    assert list(answers[0][1]["times_ms"]) == ["prepare", "infer", "answer"]
    figures = stats["inference_stats"]
    assert (figures["success"]["count"], figures["fail"]["count"]) == (2, 1)
    assert figures["compute_input"]["ns"] > 0  # it prepared them at the run
    assert figures["compute_output"]["ns"] > 0


def test_answer_that_cannot_be_written_is_an_error(cells: Running) -> None:
    errors: list[BaseException] = []

    def reply(answered: Answered | BaseException) -> None:
        if not isinstance(answered, Answered):
            errors.append(answered)
            return
        raise ValueError("infinity is no JSON")

    model = functools.partial(cells.service.registry.models.find, "cells", None)
    request = AnswerRequest(find=model, reply=reply, decodes=False)
    request.served = cells.call(model)
    request.finish()
    assert [str(error) for error in errors] == ["infinity is no JSON"]


def test_refused_and_cancelled_files_are_counted(maker: PackageMaker, tmp_path: Path) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg")
    models = {"cells": ModelOptions(isolated=False)}
    config = make_config(tmp_path, media=MediaLimits(max_waiting=1), models=models)
    replies: queue.SimpleQueue[Answered | BaseException] = queue.SimpleQueue()
    with running(config, PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:

        def submit(*, has_left: bool) -> None:
            find = functools.partial(service.service.registry.models.find, "cells", None)
            picture = encode(draw(red=(1, 0)))
            service.service.answers.submit(
                AnswerRequest(find=find, reply=replies.put, data=picture, is_unwanted=lambda: has_left)
            )

        def submit_both() -> None:
            submit(has_left=True)
            with pytest.raises(OverloadedError, match="max_waiting"):
                submit(has_left=False)

        service.call(submit_both)
        assert "before the file was decoded" in str(replies.get(timeout=60))
        service.call(functools.partial(submit, has_left=False))
        assert isinstance(replies.get(timeout=60), Answered)
        metrics = service.service.registry.models.find("cells", None).metrics
    assert (metrics.succeeded, metrics.shed, metrics.cancelled, metrics.refused) == (1, 1, 1, 0)


def test_raw_frame_needs_no_codec(cells: Running) -> None:
    picture = draw(128, 64, green=(2, 1))
    kind = "video/x-raw; format={}; width=128; height=64"
    assert boxes(post(cells, picture.tobytes(), kind.format("RGB"))[1]) == {"green": [64, 32, 96, 64]}
    turned = np.ascontiguousarray(picture[:, :, ::-1])
    assert boxes(post(cells, turned.tobytes(), kind.format("BGR"))[1]) == {"green": [64, 32, 96, 64]}


def test_photograph_is_turned_upright_by_its_exif_data(cells: Running) -> None:
    lying = np.rot90(draw(128, 128, red=(3, 0)), 1)  # turned to the left; orientation 6 turns it back
    exif = Image.Exif()
    exif[0x0112] = 6
    status, answer = post(cells, encode(np.ascontiguousarray(lying), "JPEG", exif=exif), "image/jpeg")
    assert (status, boxes(answer)) == (200, {"red": [96, 0, 128, 32]})


@pytest.mark.parametrize("mode", ["CMYK", "L", "I;16", "P", "RGBA", "1"])
def test_other_colours_become_rgb(cells: Running, mode: str) -> None:
    image = Image.fromarray(draw(red=(0, 0)))
    image = Image.fromarray(np.full((64, 64), 40_000, np.uint16)) if mode == "I;16" else image.convert(mode)
    file = io.BytesIO()
    image.save(file, "JPEG" if mode == "CMYK" else "PNG")
    status, answer = post(cells, file.getvalue(), "image/jpeg" if mode == "CMYK" else "image/png")
    assert status == 200, answer


def test_options_of_the_task_can_be_set_for_one_answer(cells: Running) -> None:
    picture = encode(draw(red=(1, 1)) // 2)  # half of the light: a score of 0.5
    assert len(post(cells, picture)[1]["detections"]) == 1
    path = "/v2/models/cells/answer?min_score={}"
    assert post(cells, picture, path=path.format("0.6"))[1]["detections"] == []
    assert post(cells, picture, path=path.format("[" * 5000))[0] == 400
    status, error = post(cells, picture, path=path.format("7"))
    assert (status, "min_score" in error["error"]) == (400, True)
    assert post(cells, picture, path="/v2/models/cells/answer?zoom=2")[0] == 400
    assert post(cells, picture, path=path.format("[" * 3000))[0] == 400


def _png_of(width: int, height: int) -> bytes:
    """Return a PNG that states a size and holds one byte."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0")), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )


@pytest.mark.parametrize(
    ("body", "kind", "status", "reason"),
    [
        (_png_of(65_000, 65_000), "image/png", 400, "million pixels"),
        (_png_of(1025, 1025), "image/png", 400, "million pixels"),
        (encode(draw())[:-40], "image/png", 400, "cut short"),
        (encode(draw(), "JPEG")[:300], "image/jpeg", 400, "cut short"),
        (encode(draw(), "GIF"), "image/png", 400, "no image"),
        (encode(draw(), "GIF"), "image/gif", 415, "media type"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/svg+xml", 415, "media type"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "image/png", 400, "no image"),
        (b"", "image/jpeg", 400, "no image"),
        (b"", "", 415, "media type"),
        (b"\0" * 12, "video/x-raw; format=RGB; width=2; height=2; depth=3", 200, ""),
        (b"\0" * 11, "video/x-raw; format=RGB; width=2; height=2", 400, "expected 2 x 2"),
        (b"\0" * 12, "video/x-raw; format=RGB; width=-2; height=2", 400, "width"),
        (b"\0" * 12, "video/x-raw; format=NV12; width=2; height=2", 400, "format"),
        (b"\0" * 8, "audio/x-raw; rate=16000", 415, "takes a picture"),
    ],
)
def test_bad_media_is_refused_with_a_reason(
    cells: Running, body: bytes, kind: str, status: int, reason: str
) -> None:
    got, answer = post(cells, body, kind)
    assert (got, reason in answer.get("error", "")) == (status, True), answer
    assert post(cells, encode(draw(red=(0, 0))))[0] == 200  # the service is unharmed


def test_too_few_labels_give_numbers(maker: PackageMaker, tmp_path: Path) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg", labels=b"red\n")
    with running(make_config(tmp_path), PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        answer = post(service, encode(draw(green=(0, 0))))[1]
    assert [entry["label"] for entry in answer["detections"]] == ["1"]


@pytest.mark.parametrize(
    ("changes", "part", "rollout", "isolated"),
    [
        ({"labels": b"rouge\nvert\n"}, "labels", "canary", True),
        ({"labels": b"rouge\nvert\n"}, "labels", "shadow", False),
        ({"preprocessing": {**LETTERBOX, "fill": 9}}, "preprocessing", "canary", False),
        (
            {"task": TaskChoice("detection", {**DETECTION.options, "min_score": 0.9})},
            "task detection",
            "shadow",
            True,
        ),
    ],
)
def test_version_that_is_prepared_or_decoded_in_another_way_is_not_tried(
    maker: PackageMaker,
    tmp_path: Path,
    changes: dict[str, Any],
    part: str,
    *,
    rollout: Literal["canary", "shadow"],
    isolated: bool,
) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version, changed in (("1.0.0", {}), ("2.0.0", changes)):
        write_cell_detector(maker, tmp_path / "cells.edgepkg", version=version, **changed)
        slots.install(tmp_path / "cells.edgepkg")
        if version == "1.0.0":
            slots.begin_start("cells").package.close()
            slots.confirm("cells", version)
    config = make_config(tmp_path, models={"cells": ModelOptions(rollout=rollout, isolated=isolated)})
    with running(config, InstalledModels(slots)) as service:
        reply = load(service, "cells")
        assert (reply.status, f"2.0.0 has {part} " in reply.json["error"]) == (400, True), reply.json
        assert "set rollout = 'swap'" in reply.json["error"]
        answer = post(service, encode(draw(red=(0, 0))))[1]
    assert (answer["model_version"], list(boxes(answer))) == ("1.0.0", ["red"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"task": None}, "--task"),
        ({"preprocessing": None}, "--preprocessing"),
        ({"task": None, "preprocessing": None}, "--task"),
    ],
)
def test_model_without_task_or_preprocessing_says_what_to_package(
    maker: PackageMaker, tmp_path: Path, changes: dict[str, None], reason: str
) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg", **changes)
    with running(make_config(tmp_path), PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        status, answer = post(service, encode(draw()))
    assert (status, reason in answer["error"]) == (400, True), answer


def test_package_with_a_wrong_task_is_not_served(maker: PackageMaker, tmp_path: Path) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg", task=TaskChoice("detection", {"layout": "none"}))
    with running(make_config(tmp_path), PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        assert post(service, encode(draw()))[0] in (400, 404, 503)
        (line,) = service.do(service.service.registry.index())
    assert (line.state, "layout" in line.reason) == ("UNAVAILABLE", True), line


def test_isolated_model_answers_in_its_own_process(maker: PackageMaker, tmp_path: Path) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg")
    config = make_config(tmp_path, models={"cells": ModelOptions(isolated=True)})
    with running(config, PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        status, answer = post(service, encode(draw(red=(2, 2))))
    assert (status, boxes(answer)) == (200, {"red": [64, 64, 96, 96]})


def test_file_is_worth_sending_again_while_the_process_of_its_model_starts(
    maker: PackageMaker, tmp_path: Path
) -> None:
    write_cell_detector(maker, tmp_path / "cells.edgepkg")
    config = make_config(tmp_path, models={"cells": ModelOptions(isolated=True)})
    picture, statuses = encode(draw(red=(2, 2))), list[tuple[int, int]]()

    def is_back() -> bool:
        statuses.append((infer(service, picture)[0], post(service, picture)[0]))
        assert set(statuses[-1]) <= {200, 503}, statuses
        return statuses[-1] == (200, 200)

    with running(config, PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        kill(service, signal.SIGKILL, "cells")
        wait_for(is_back, "the process")
    assert statuses[0] == (503, 503)


def test_classification_of_very_many_rows_is_refused() -> None:
    scores = np.zeros((1, 100, 200, 2), np.float32)
    assert classify(scores[:, :50], 1, ("a", "b")).shape == (1, 50, 200, 1)
    with pytest.raises(RequestError, match="ask for the scores"):
        classify(scores, 1, ("a", "b"))


def infer(
    service: Running,
    body: bytes,
    *,
    datatype: str = "BYTES",
    outputs: list[dict[str, Any]] | None = None,
    parameters: dict[str, Any] | None = None,
    shape: list[int] | None = None,
) -> tuple[int, dict[str, Any], bytes]:
    """Send a file over the standard protocol; return status, JSON and binary data of the response."""
    data = struct.pack("<I", len(body)) + body if datatype == "BYTES" else body
    entry = {
        "name": "pixels",
        "datatype": datatype,
        "shape": shape or ([1] if datatype == "BYTES" else [len(data)]),
        "parameters": {"binary_data_size": len(data), **(parameters or {})},
    }
    document: dict[str, Any] = {"inputs": [entry]}
    if outputs is not None:
        document["outputs"] = outputs
    text = json.dumps(document).encode()
    path = "/v2/models/cells/infer"
    fields = {"Inference-Header-Content-Length": str(len(text))}
    status, fields, answer = exchange(service, "POST", path, text + data, fields)
    end = int(fields.get("Inference-Header-Content-Length", len(answer)))
    return status, json.loads(answer[:end]), answer[end:]


@pytest.mark.parametrize("datatype", ["BYTES", "UINT8"])
def test_standard_protocol_takes_a_file_and_gives_raw_outputs(cells: Running, datatype: str) -> None:
    picture = draw(64, 64, red=(1, 2))
    parameters = {"content_type": "image/png"} if datatype == "UINT8" else None
    status, document, _ = infer(cells, encode(picture), datatype=datatype, parameters=parameters)
    assert status == 200, document
    (output,) = document["outputs"]
    scores = np.array(output["data"]).reshape(output["shape"])[0, 4]
    assert (output["name"], output["shape"], scores.argmax()) == ("boxes", [1, 6, 16], 2 * 4 + 1)


def test_answer_is_one_more_output(cells: Running) -> None:
    outputs = [{"name": "boxes"}, {"name": "answer", "parameters": {"binary_data": True}}]
    status, document, data = infer(cells, encode(draw(green=(1, 1))), outputs=outputs)
    assert status == 200, document
    described = document["outputs"][1]
    assert (described["datatype"], described["shape"]) == ("BYTES", [1])
    assert described["parameters"]["binary_data_size"] == len(data) == 4 + struct.unpack("<I", data[:4])[0]
    assert boxes(json.loads(data[4:])) == {"green": [32, 32, 64, 64]}
    (text,) = infer(cells, encode(draw(red=(0, 0))), outputs=[{"name": "answer"}])[1]["outputs"][0]["data"]
    assert boxes(json.loads(text)) == {"red": [0, 0, 32, 32]}


def test_answer_has_no_classes(cells: Running) -> None:
    outputs = [{"name": "answer", "parameters": {"classification": 2}}]
    status, document, _ = infer(cells, encode(draw()), outputs=outputs)
    assert (status, "no classes" in document["error"]) == (400, True)


def test_output_of_a_model_may_have_the_name_of_the_answer(maker: PackageMaker, tmp_path: Path) -> None:
    sketch = Manifest_("echo", "1.0.0", {"x": "answer"}, {"x": np.ones((2, 3), np.float32)})
    write_model(maker, tmp_path / "echo.edgepkg", sketch)
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}
    with running(make_config(tmp_path), PackageFiles([tmp_path / "echo.edgepkg"], maker.trust)) as service:
        for document in ({"inputs": [entry]}, {"inputs": [entry], "outputs": [{"name": "answer"}]}):
            body = json.dumps(document).encode()
            status, answer = post(service, body, "application/json", path="/v2/models/echo/infer")
            assert (status, answer["outputs"][0]["data"]) == (200, [1, 2, 3])


def test_classification_states_the_best_classes(cells: Running) -> None:
    outputs = [{"name": "boxes", "parameters": {"classification": 2}}]
    status, document, _ = infer(cells, encode(draw(64, 64, red=(3, 0))), outputs=outputs)
    assert status == 200, document
    (output,) = document["outputs"]
    assert (output["datatype"], output["shape"]) == ("BYTES", [1, 6, 2])
    assert output["data"][8] == "1.000000:3"  # the scores of red by cell; there are two labels, not four
    assert output["data"][0].endswith(":3")


@pytest.mark.parametrize(
    ("datatype", "parameters", "shape", "reason"),
    [
        ("BYTES", {}, [2], "BYTES [1]"),
        ("BYTES", {"content_type": "image/gif"}, None, "media type"),
        ("UINT8", {}, None, "datatype"),
        ("UINT8", {"content_type": "image/png"}, [3], "UINT8 [bytes]"),
        ("BYTES", {"content_type": 7}, None, "content_type"),
    ],
)
def test_wrong_file_in_the_standard_protocol_is_refused(
    cells: Running, datatype: str, parameters: dict[str, Any], shape: list[int] | None, reason: str
) -> None:
    status, document, _ = infer(cells, encode(draw()), datatype=datatype, parameters=parameters, shape=shape)
    assert status in (400, 415)
    assert reason in document["error"]


@pytest.mark.parametrize(
    "data", [b"", b"\x02\0\0", b"\x09\0\0\0GIF", b"\x01\0\0\0GIF", b"\xff\xff\xff\xffGIF"]
)
def test_file_behind_a_wrong_length_is_refused(cells: Running, data: bytes) -> None:
    parameters = {"binary_data_size": len(data)}
    entry = {"name": "pixels", "datatype": "BYTES", "shape": [1], "parameters": parameters}
    text = json.dumps({"inputs": [entry]}).encode()
    fields = {"Inference-Header-Content-Length": str(len(text))}
    status, _, answer = exchange(cells, "POST", "/v2/models/cells/infer", text + data, fields)
    assert (status, "behind its length" in json.loads(answer)["error"]) == (400, True)


def test_tensors_give_answers_too(cells: Running) -> None:
    pixels = np.zeros((1, 3, 64, 64), np.float32)
    entry = {"name": "pixels", "datatype": "FP32", "shape": [1, 3, 64, 64], "data": pixels.ravel().tolist()}
    document = {"inputs": [entry], "outputs": [{"name": "answer"}]}
    status, answer = post(
        cells, json.dumps(document).encode(), "application/json", path="/v2/models/cells/infer"
    )
    assert (status, json.loads(answer["outputs"][0]["data"][0])) == (200, {"detections": []})


def test_task_that_cannot_decode_the_outputs_fails_the_self_test(maker: PackageMaker, tmp_path: Path) -> None:
    task = TaskChoice("detection", {"layout": "grid"})  # 84 cells on 64 pixels; the model gives 16 boxes
    write_cell_detector(maker, tmp_path / "cells.edgepkg", task=task)
    with running(make_config(tmp_path), PackageFiles([tmp_path / "cells.edgepkg"], maker.trust)) as service:
        (line,) = service.do(service.service.registry.index())
    assert line.state == "UNAVAILABLE"
    assert "failed its self-test" in line.reason
    assert "cells" in line.reason
