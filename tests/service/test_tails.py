import contextlib
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tests.runtime.conftest import PackageMaker
from tests.runtime.gpu_stand_in import CPU, CUDA, give_gpu
from tests.service.service_parts import (
    Reply,
    Running,
    X,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
)
from tests.service.tail_parts import FEATURES, Part, scale_part, write_split
from tests.waiting import wait_for

from edgekit_runtime.client.client import Client
from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import RequestError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.sessions import open_session

Array = np.ndarray[Any, np.dtype[Any]]


def infer(service: Running, name: str, tensor: str, array: Array) -> dict[str, Array]:
    with Client(str(service.socket_path)) as client:
        return dict(client.infer(name, {tensor: array}))


def test_tails_are_served_under_their_digest_without_head_and_whole_model(
    maker: PackageMaker, tmp_path: Path
) -> None:
    path = tmp_path / "split.edgepkg"
    _, tail = write_split(maker, path, scale_part("cut1.head", 2.0), scale_part("cut1.tail", 3.0))
    with running(make_config(tmp_path), PackageFiles([], maker.trust, [path])) as service:
        index = ask(service, post_bytes("/v2/repository/index", b"")).json
        assert [(line["name"], line["state"]) for line in index] == [(tail, "READY")]
        np.testing.assert_array_equal(infer(service, tail, "features", FEATURES)["z"], FEATURES * 3)
        assert ask(service, get_bytes("/v2/models/linear")).status == 404
        described = ask(service, get_bytes(f"/v2/models/{tail}")).json
        assert [one["name"] for one in described["inputs"]] == ["features"]


def test_tails_are_served_beside_the_whole_model(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "split.edgepkg"
    (tail,) = write_split(maker, path, scale_part("cut1.tail", 3.0))
    with running(make_config(tmp_path), PackageFiles([path], maker.trust, [path])) as service:
        assert ask(service, infer_bytes(X)).binary == Y
        np.testing.assert_array_equal(infer(service, tail, "features", FEATURES)["z"], FEATURES * 3)


def test_tails_of_two_versions_answer_side_by_side(maker: PackageMaker, tmp_path: Path) -> None:
    folder = tmp_path / "packages"
    folder.mkdir()
    names = [
        write_split(maker, folder / f"{version}.edgepkg", scale_part("cut1.tail", factor), version=version)[0]
        for version, factor in (("1.0.0", 3.0), ("2.0.0", 5.0))
    ]
    assert names[0] != names[1]
    with running(make_config(tmp_path), PackageFiles([], maker.trust, [folder])) as service:
        for name, factor in zip(names, (3.0, 5.0), strict=True):
            np.testing.assert_array_equal(infer(service, name, "features", FEATURES)["z"], FEATURES * factor)
        with pytest.raises(RequestError, match="is unknown"):
            infer(service, names[0][:-1] + "x", "features", FEATURES)


def test_tail_that_computes_something_else_is_not_served(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "split.edgepkg"
    wrong = scale_part("cut1.tail", 3.0)
    wrong.outputs = {"z": FEATURES}
    (tail,) = write_split(maker, path, wrong)
    (good,) = write_split(maker, tmp_path / "good.edgepkg", scale_part("cut1.tail", 4.0))
    source = PackageFiles([], maker.trust, [path, tmp_path / "good.edgepkg"])
    with running(make_config(tmp_path), source) as service:
        index = {line["name"]: line for line in ask(service, post_bytes("/v2/repository/index", b"")).json}
        assert index[good]["state"] == "READY"
        assert index[tail]["state"] == "UNAVAILABLE"
        assert "self-test" in index[tail]["reason"]


def test_isolated_tail_answers_from_its_own_process(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "split.edgepkg"
    (tail,) = write_split(maker, path, scale_part("cut1.tail", 3.0))
    config = make_config(tmp_path, models={tail: ModelOptions(isolated=True)})
    with running(config, PackageFiles([], maker.trust, [path])) as service:
        np.testing.assert_array_equal(infer(service, tail, "features", FEATURES)["z"], FEATURES * 3)
        assert service.call(service.service.workers.count_restarts) is not None


def test_rows_of_several_devices_share_a_batch(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "split.edgepkg"
    (tail,) = write_split(maker, path, scale_part("cut1.tail", 3.0))
    options = ModelOptions(scheduling=SchedulingLimits(max_batch=4, max_delay_s=0.2))
    with running(
        make_config(tmp_path, models={tail: options}), PackageFiles([], maker.trust, [path])
    ) as service:
        entry = {
            "name": "features",
            "datatype": "FP32",
            "shape": [1, 3],
            "data": FEATURES.reshape(-1).tolist(),
        }
        body = json.dumps({"inputs": [entry]}).encode()
        clients = [service.connect() for _ in range(4)]
        for client in clients:
            client.sendall(post_bytes(f"/v2/models/{tail}/infer", body))
        for client in clients:
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            client.close()
        stats = ask(service, get_bytes(f"/v2/models/{tail}/stats")).json["model_stats"][0]
        assert stats["inference_count"] == 4
        assert stats["execution_count"] < 4


def test_requests_that_wait_for_a_batch_are_answered_when_the_service_ends(
    maker: PackageMaker, tmp_path: Path
) -> None:
    (tail,) = write_split(maker, tmp_path / "split.edgepkg", scale_part("cut1.tail", 3.0))
    limits = SchedulingLimits(max_batch=8, max_delay_s=5.0)
    config = make_config(tmp_path, models={tail: ModelOptions(scheduling=limits)})
    entry = {"name": "features", "datatype": "FP32", "shape": [1, 3], "data": FEATURES.reshape(-1).tolist()}
    request = post_bytes(f"/v2/models/{tail}/infer", json.dumps({"inputs": [entry]}).encode())
    source = PackageFiles([], maker.trust, [tmp_path / "split.edgepkg"])
    with contextlib.ExitStack() as stack:
        with running(config, source) as service:
            clients = [stack.enter_context(service.connect()) for _ in range(4)]
            for client in clients:
                client.sendall(request)
            line = f'edgekit_queue_length{{model="{tail}",version="1.0.0"}} 4\n'
            wait_for(lambda: line in ask(service, get_bytes("/metrics")).body.decode(), "all in the queue")
        for client in clients:
            answer = client.recv(1 << 16)
            assert answer.startswith(b"HTTP/1.1 200")
            assert answer.endswith(b"[1.5,-3.0,6.0]}]}")
            assert client.recv(1) == b""


# Media


def mean_part(codec: str, data: bytes, shape: list[int | str]) -> Part:
    """mean[N, 3] over height and width of pixels uint8 [N, H, W, 3]."""
    helper = onnx.helper
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["pixels"], ["wide"], to=onnx.TensorProto.FLOAT),
            helper.make_node("ReduceMean", ["wide"], ["mean"], axes=[1, 2], keepdims=0),
        ],
        "mean",
        [helper.make_tensor_value_info("pixels", onnx.TensorProto.UINT8, shape)],
        [helper.make_tensor_value_info("mean", onnx.TensorProto.FLOAT, [shape[0], 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    return Part(
        "photo.tail",
        model.SerializeToString(),
        {"pixels": np.frombuffer(data, np.uint8)},
        {"mean": np.array([[100, 150, 200]], np.float32)},
        {"pixels": ("any",)},
        {"decode": {"pixels": codec}},
    )


def plain(height: int = 16, width: int = 24) -> Array:
    return np.broadcast_to(np.array([100, 150, 200], np.uint8), (height, width, 3)).copy()


def send_file(service: Running, name: str, data: bytes) -> Reply:
    entry = {
        "name": "pixels",
        "datatype": "UINT8",
        "shape": [len(data)],
        "parameters": {"binary_data_size": len(data)},
    }
    text = json.dumps({"inputs": [entry]}).encode()
    fields = f"Inference-Header-Content-Length: {len(text)}\r\n"
    return ask(service, post_bytes(f"/v2/models/{name}/infer", text + data, fields))


@pytest.mark.parametrize(
    "shape",
    [
        [1, "H", "W", 3],
        *(pytest.param(shape, marks=pytest.mark.long) for shape in (["N", 16, 24, 3], [1, 16, 24, 3])),
    ],
)
def test_tail_decodes_photographs_and_refuses_what_is_none(
    shape: list[int | str], maker: PackageMaker, tmp_path: Path
) -> None:
    pytest.importorskip("PIL")
    file = encode_media(MediaCodec.parse("webp:100"), plain())
    part = mean_part("webp", file, shape)
    # What WebP makes of this colour, which must be what the server gets.
    decoded = decode_media(MediaCodec.parse("webp"), file, dtype="uint8")
    part.outputs = {"mean": decoded.mean(axis=(0, 1), dtype=np.float32)[None]}
    (tail,) = write_split(maker, tmp_path / "split.edgepkg", part)
    options = ModelOptions(scheduling=SchedulingLimits(max_batch=8))
    source = PackageFiles([], maker.trust, [tmp_path / "split.edgepkg"])
    with running(make_config(tmp_path, models={tail: options}), source) as service:
        reply = send_file(service, tail, file)
        assert reply.status == 200
        np.testing.assert_allclose(reply.json["outputs"][0]["data"], part.outputs["mean"][0], atol=1e-4)
        larger = encode_media(MediaCodec.parse("webp:100"), plain(16, 25))
        bomb = encode_media(MediaCodec.parse("webp:1"), plain(6000, 6000))
        hostile = [b"", b"x", file[:-9], bomb, encode_media(MediaCodec.parse("jpeg"), plain())]
        if "W" not in shape:
            hostile.append(larger)
        for data in hostile:
            reply = send_file(service, tail, data)
            assert reply.status == 400, (reply.json, len(data))
        assert send_file(service, tail, file).status == 200


def test_tail_that_decodes_photographs_passes_its_self_test_on_a_gpu(
    maker: PackageMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("PIL")
    file = encode_media(MediaCodec.parse("webp:100"), plain())
    part = mean_part("webp", file, [1, "H", "W", 3])
    decoded = decode_media(MediaCodec.parse("webp"), file, dtype="uint8")
    part.outputs = {"mean": decoded.mean(axis=(0, 1), dtype=np.float32)[None]}
    write_split(maker, tmp_path / "split.edgepkg", part)
    opened = give_gpu(monkeypatch)
    caplog.set_level(logging.WARNING, "edgekit_runtime")
    with read_package(tmp_path / "split.edgepkg", maker.trust) as package:
        open_session(package.select_submodel(part.name)).close()
    assert list(opened[-1]) == [CUDA, CPU]
    assert not caplog.records


@pytest.mark.parametrize("decode", [{"pixels": "png"}, {"photo": "jpeg"}, {"pixels": "opus"}, "jpeg"])
def test_tail_with_a_codec_that_does_not_fit_is_not_served(
    decode: Any, maker: PackageMaker, tmp_path: Path
) -> None:
    part = mean_part("jpeg", b"123", [1, 16, 24, 3])
    part.options = {"decode": decode}
    (tail,) = write_split(maker, tmp_path / "split.edgepkg", part)
    source = PackageFiles([], maker.trust, [tmp_path / "split.edgepkg"])
    with running(make_config(tmp_path), source) as service:
        (line,) = ask(service, post_bytes("/v2/repository/index", b"")).json
        assert (line["name"], line["state"]) == (tail, "UNAVAILABLE")
