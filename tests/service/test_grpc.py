"""The protocol over gRPC, seen in frames: calls, errors, deadlines, cancellation, streams, flow control."""

import asyncio
import gzip
import socket
import ssl
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.gates import Gate
from tests.service.grpc_parts import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    STREAM,
    WINDOW_UPDATE,
    GrpcClient,
    connecting,
    frame,
    grpc_path,
    grpc_port,
    head_fields,
    infer_message,
    running_grpc,
    setting,
    word,
    wrap,
)
from tests.service.serve_parts import TOKEN
from tests.service.service_parts import (
    Manifest_,
    Running,
    Y,
    ask,
    get_bytes,
    infer_bytes,
    write_identity,
    write_signed,
)

from edgekit_runtime.protocol.datatypes import DATATYPE_OF_DTYPE
from edgekit_runtime.service.grpc.messages import encode_varint, write_message
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.memory_cap import estimate_bytes
from edgekit_runtime.service.models.version_policy import Servable
from edgekit_runtime.service.options.http import HttpLimits
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.resources import ModelMemory

INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, RESOURCE_EXHAUSTED = 3, 4, 5, 8
PERMISSION_DENIED, UNIMPLEMENTED, UNAVAILABLE, UNAUTHENTICATED = 7, 12, 14, 16
LONG = np.arange(400_000, dtype=np.float32).reshape(-1, 4)  # 1.6 MB in, 0.8 MB out


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running_grpc(maker, tmp_path_factory.mktemp("g")) as service:
        yield service


@pytest.fixture
def client(service: Running) -> Iterator[GrpcClient]:
    with connecting(grpc_path(service)) as client:
        yield client


def read_message_of(client: GrpcClient, method: str, **values: Any) -> Any:
    reply = client.ask(write_message(f"{method}Request", values), method)
    assert reply.status == 0, reply.text
    (message,) = reply.messages(f"{method}Response")
    return message


# Methods


def test_inference_answers_as_over_http(client: GrpcClient, service: Running) -> None:
    reply = client.ask(infer_message(id="an id"))
    (message,) = reply.messages()
    assert (message["model_name"], message["model_version"], message["id"]) == ("linear", "1.0.0", "an id")
    assert message["outputs"][0]["datatype"] == "FP32"
    assert message["raw_output_contents"] == [Y]
    assert (reply.fields[":status"], reply.fields["content-type"]) == ("200", "application/grpc")
    assert ask(service, infer_bytes(np.array([[1, 2, 3, 4]], np.float32))).binary == Y


def test_repeated_inferences_of_other_shapes_get_their_own_answers(client: GrpcClient) -> None:
    for rows in (1, 3, 1, 2):
        x = np.full((rows, 4), rows, np.float32)
        assert np.array_equal(client.ask(infer_message(x)).array(), x @ WEIGHT)


def test_server_and_model_say_that_they_are_ready(client: GrpcClient) -> None:
    assert read_message_of(client, "ServerLive") == {"live": True}
    assert read_message_of(client, "ServerReady") == {"ready": True}
    assert read_message_of(client, "ModelReady", name="linear") == {"ready": True}
    assert read_message_of(client, "ModelReady", name="linear", version="1.0.0") == {"ready": True}
    assert read_message_of(client, "ModelReady", name="other") == {"ready": False}


def test_metadata_statistics_and_index_have_the_values_of_http(client: GrpcClient, service: Running) -> None:
    client.ask(infer_message())
    stated = ask(service, get_bytes("/v2")).json
    assert read_message_of(client, "ServerMetadata") == stated
    stated = ask(service, get_bytes("/v2/models/linear")).json
    assert read_message_of(client, "ModelMetadata", name="linear") == stated
    (line,) = read_message_of(client, "ModelStatistics", name="linear")["model_stats"]
    assert line["inference_stats"]["success"]["count"] >= 1
    assert read_message_of(client, "RepositoryIndex", ready=True)["models"] == [
        {"name": "linear", "version": "1.0.0", "state": "READY", "reason": ""}
    ]


def test_model_is_unloaded_and_loaded(maker: PackageMaker, tmp_path: Path) -> None:
    with running_grpc(maker, tmp_path) as service, connecting(grpc_path(service)) as client:
        read_message_of(client, "RepositoryModelUnload", model_name="linear")
        assert client.ask(infer_message()).status == UNAVAILABLE
        read_message_of(client, "RepositoryModelLoad", model_name="linear")
        assert client.ask(infer_message()).status == 0
        parameters = {"config": {"string_param": "{}"}}
        values = {"model_name": "linear", "parameters": parameters}
        reply = client.ask(write_message("RepositoryModelLoadRequest", values), "RepositoryModelLoad")
        assert (reply.status, "signed" in reply.text) == (INVALID_ARGUMENT, True)


def test_model_that_was_unloaded_for_another_is_loaded_for_its_request(
    maker: PackageMaker, tmp_path: Path
) -> None:
    maker.write(tmp_path / "linear.edgepkg")
    write_identity(maker, tmp_path / "echo.edgepkg", ["float32"])
    sizes = [
        estimate_bytes([Servable("m", "1", tmp_path / name, "")])
        for name in ("linear.edgepkg", "echo.edgepkg")
    ]
    memory = ModelMemory(max_bytes=int(1.2 * max(sizes)))
    x = np.ones((1, 3), np.float32)
    tensor = {"name": "in_float32", "datatype": "FP32", "shape": [1, 3]}
    echo = infer_message(model="echo", inputs=[tensor], raw_input_contents=[x.tobytes()])
    source = PackageFiles([tmp_path], maker.trust)
    with running_grpc(maker, tmp_path, source, memory=memory) as service:
        with connecting(grpc_path(service)) as client:
            for _ in range(2):
                assert client.ask(infer_message()).array().tobytes() == Y
                assert client.ask(echo).array().tobytes() == x.tobytes()
        assert sum(service.service.metrics.swaps[name, "evicted"] for name in ("linear", "echo")) >= 3


# Tensors


@pytest.mark.parametrize("is_raw", [True, False])
def test_every_datatype_comes_back_as_it_was_sent(maker: PackageMaker, tmp_path: Path, is_raw: bool) -> None:
    dtypes = [dtype for dtype in DATATYPE_OF_DTYPE if is_raw or dtype != "float16"]  # no contents carry FP16
    write_identity(maker, tmp_path / "echo.edgepkg", dtypes)
    arrays: dict[str, Any] = {dtype: np.array([[1, 0, 1]], dtype) for dtype in dtypes}
    fields = {"bool": "bool_contents", "float32": "fp32_contents", "float64": "fp64_contents"}
    inputs = []
    for dtype, array in arrays.items():
        tensor: dict[str, Any] = {
            "name": f"in_{dtype}",
            "datatype": DATATYPE_OF_DTYPE[dtype],
            "shape": [1, 3],
        }
        if not is_raw:
            kind = "uint" if dtype.startswith("u") else "int"
            wide = "64" if dtype.endswith("64") else ""
            is_float = dtype.startswith("float")
            packed = array.tobytes() if is_float else b"".join(encode_varint(int(v)) for v in array.flat)
            tensor["contents"] = {fields.get(dtype, f"{kind}{wide}_contents"): packed}
        inputs.append(tensor)
    raw = [array.tobytes() for array in arrays.values()] if is_raw else []
    message = infer_message(model="echo", inputs=inputs, raw_input_contents=raw)
    with (
        running_grpc(maker, tmp_path, PackageFiles([tmp_path / "echo.edgepkg"], maker.trust)) as service,
        connecting(grpc_path(service)) as client,
    ):
        for _ in range(2):
            (answer,) = client.ask(message).messages()
            found = dict(
                zip([o["name"] for o in answer["outputs"]], answer["raw_output_contents"], strict=True)
            )
            assert found == {f"out_{dtype}": array.tobytes() for dtype, array in arrays.items()}


POSITIVE_ROWS = """<ir_version: 8, opset_import: ["" : 17]> rows (float[N, 4] x) => (float[M, 4] y) {
    best = ReduceMax<axes = [1], keepdims = 0>(x)
    zero = Constant<value_float = 0.0>()
    positive = Greater(best, zero)
    y = Compress<axis = 0>(x, positive)
}"""


def test_output_without_values_is_an_empty_tensor(maker: PackageMaker, tmp_path: Path) -> None:
    model, x = onnx.parser.parse_model(POSITIVE_ROWS), np.ones((1, 4), np.float32)
    write_signed(
        maker,
        tmp_path / "rows.edgepkg",
        Manifest_("rows", "1.0.0", {}, {"x": x}),
        {"y": x},
        model.SerializeToString(),
    )
    with (
        running_grpc(maker, tmp_path, PackageFiles([tmp_path / "rows.edgepkg"], maker.trust)) as service,
        connecting(grpc_path(service)) as client,
    ):
        assert client.ask(infer_message(x, model="rows")).array().tobytes() == x.tobytes()
        (message,) = client.ask(infer_message(-x, model="rows")).messages()
        assert (message["outputs"][0]["shape"], message["raw_output_contents"]) == ([0, 4], [b""])


TENSOR = {"name": "x", "datatype": "FP32", "shape": [1, 4]}
VALUES = np.ones(4, np.float32).tobytes()


@pytest.mark.parametrize(
    ("changes", "status", "word_"),
    [
        ({"model_name": "other"}, NOT_FOUND, "unknown"),
        ({"model_version": "9"}, NOT_FOUND, "version"),
        ({"inputs": [], "raw_input_contents": []}, INVALID_ARGUMENT, "missing"),
        ({"inputs": [{**TENSOR, "shape": [1, 3]}]}, INVALID_ARGUMENT, "shape"),
        ({"inputs": [{**TENSOR, "shape": [-1, 4]}]}, INVALID_ARGUMENT, "shape"),
        ({"inputs": [{**TENSOR, "datatype": "FP64"}]}, INVALID_ARGUMENT, "FP64"),
        ({"inputs": [{**TENSOR, "datatype": "BYTES"}]}, INVALID_ARGUMENT, "BYTES"),
        ({"inputs": [TENSOR, TENSOR]}, INVALID_ARGUMENT, "no entry"),
        ({"raw_input_contents": [VALUES, VALUES]}, INVALID_ARGUMENT, "bytes"),
        ({"raw_input_contents": [VALUES[:-1]]}, INVALID_ARGUMENT, "bytes"),
        ({"inputs": [{**TENSOR, "contents": {"fp32_contents": VALUES}}]}, INVALID_ARGUMENT, "beside"),
        ({"outputs": [{"name": "z"}]}, INVALID_ARGUMENT, "output"),
        ({"parameters": {"sequence_id": {"int64_param": 7}}}, INVALID_ARGUMENT, "sequence"),
        ({"parameters": {"priority": {"string_param": "high"}}}, INVALID_ARGUMENT, "priority"),
    ],
)
def test_request_that_does_not_fit_is_refused_with_the_reason(
    client: GrpcClient, changes: dict[str, Any], status: int, word_: str
) -> None:
    for _ in range(2):
        reply = client.ask(infer_message(**{"raw_input_contents": [VALUES], "inputs": [TENSOR], **changes}))
        assert (reply.status, word_ in reply.text) == (status, True), reply.text
    assert client.ask(infer_message()).status == 0


@pytest.mark.parametrize(
    ("contents", "word_"),
    [
        ({"fp32_contents": VALUES[:-1]}, "bytes"),
        ({"fp64_contents": VALUES}, "fp32_contents"),
        ({"bytes_contents": [b"a"]}, "fp32_contents"),
    ],
)
def test_typed_contents_that_do_not_fit_are_refused(
    client: GrpcClient, contents: dict[str, Any], word_: str
) -> None:
    reply = client.ask(infer_message(inputs=[{**TENSOR, "contents": contents}], raw_input_contents=[]))
    assert (reply.status, word_ in reply.text) == (INVALID_ARGUMENT, True), reply.text


def test_two_forms_of_the_same_head_do_not_mix(client: GrpcClient) -> None:
    """The second request has the head of the first, and no tensors."""
    assert client.ask(infer_message()).status == 0
    assert client.ask(infer_message(raw_input_contents=[])).status == INVALID_ARGUMENT
    assert client.ask(infer_message()).status == 0


@pytest.mark.parametrize("message", [b"\xff", b"\x0a\x05ab", b"\x08", b"\x3b", b"\x0a\x01\xff"])
def test_bytes_that_are_no_message_are_refused(client: GrpcClient, message: bytes) -> None:
    reply = client.ask(message)
    assert (reply.status, "malformed" in reply.text) == (INVALID_ARGUMENT, True), reply.text


@pytest.mark.parametrize("field", [b"\x2a\x00", b"\x3a\x00", b"\x50\x00"])
def test_message_of_many_fields_is_refused_unread(client: GrpcClient, field: bytes) -> None:
    began_s = time.process_time()
    assert client.ask(field * 500_000).status == RESOURCE_EXHAUSTED
    assert time.process_time() - began_s < 1.0  # to read it would take longer


def test_long_typed_contents_are_refused_with_the_way_out(client: GrpcClient) -> None:
    tensor = {**TENSOR, "shape": [300_000, 4], "contents": {"fp32_contents": bytes(4_800_000)}}
    reply = client.ask(infer_message(inputs=[tensor], raw_input_contents=[]))
    assert (reply.status, "raw_input_contents" in reply.text) == (RESOURCE_EXHAUSTED, True)


# Calls


def test_unknown_method_and_content_are_refused(client: GrpcClient) -> None:
    reply = client.ask(b"", "ModelConfig")
    assert (reply.status, "ModelInfer" in reply.text) == (UNIMPLEMENTED, True)
    assert client.ask(b"", content_type="application/json").fields[":status"] == "415"


@pytest.mark.parametrize(
    ("body", "word_"),
    [
        (b"", "without a message"),
        (b"\0\0\0\0\5ab", "middle"),
        (b"\0\0", "middle"),
        (wrap(b"") * 2, "second"),
        (b"\1\0\0\0\1a", "grpc-encoding"),
        (b"\2\0\0\0\1a", "grpc-encoding"),
    ],
)
def test_stream_that_is_not_one_message_is_refused(client: GrpcClient, body: bytes, word_: str) -> None:
    stream = client.begin()
    client.send(frame(DATA, END_STREAM, stream, body))
    reply = client.wait(stream)
    assert (reply.status, word_ in reply.text) == (INVALID_ARGUMENT, True)


def test_message_larger_than_the_limit_is_refused_before_it_is_sent(
    maker: PackageMaker, tmp_path: Path
) -> None:
    with (
        running_grpc(maker, tmp_path, http=HttpLimits(max_body_bytes=1000)) as service,
        connecting(grpc_path(service)) as client,
    ):
        stream = client.begin()
        client.send(frame(DATA, 0, stream, b"\0" + word(1001)))
        reply = client.wait(stream)
        assert (reply.status, "1001" in reply.text) == (RESOURCE_EXHAUSTED, True)
        while reply.reset is None:
            client.read()
        client.send(frame(DATA, END_STREAM, stream, bytes(1001)))  # on its way already
        assert client.ask(infer_message()).status == 0


@pytest.mark.parametrize("coding", ["gzip", "deflate"])
@pytest.mark.parametrize("rows", [1, 60_000])
def test_compressed_message_is_answered_alike(client: GrpcClient, coding: str, rows: int) -> None:
    x = np.ones((rows, 4), np.float32)
    x[0] = [1, 2, 3, 4]
    packed = (gzip.compress if coding == "gzip" else zlib.compress)(infer_message(x))
    stream = client.begin(grpc_encoding=coding)
    client.send(frame(DATA, END_STREAM, stream, wrap(packed, is_compressed=True)))
    assert np.array_equal(client.wait(stream).array(), x @ WEIGHT)


def test_bomb_is_refused(client: GrpcClient) -> None:
    stream = client.begin(grpc_encoding="gzip")
    body = wrap(gzip.compress(bytes(80 << 20)), is_compressed=True)
    client.send(frame(DATA, END_STREAM, stream, body))
    assert client.wait(stream).status == RESOURCE_EXHAUSTED


def test_unknown_coding_is_refused_with_those_that_are_known(client: GrpcClient) -> None:
    stream = client.begin(grpc_encoding="snappy")
    client.send(frame(DATA, END_STREAM, stream, wrap(b"abc", is_compressed=True)))
    reply = client.wait(stream)
    assert (reply.status, reply.fields["grpc-accept-encoding"]) == (UNIMPLEMENTED, "identity,gzip,deflate")


def test_deadline_that_has_passed_is_said(client: GrpcClient) -> None:
    assert client.ask(infer_message(), grpc_timeout="0n").status == DEADLINE_EXCEEDED
    assert client.ask(infer_message(), grpc_timeout="10S").status == 0
    assert client.wait(client.post(infer_message(), grpc_timeout="soon")).reset is not None


@pytest.fixture
def gated(maker: PackageMaker, tmp_path: Path, gate: Gate) -> Iterator[tuple[Running, Gate]]:
    scheduling = SchedulingLimits(short_s=0.0)
    with running_grpc(maker, tmp_path, models={"linear": ModelOptions(scheduling=scheduling)}) as service:
        gate.shut()
        yield service, gate
        gate.open()


def test_call_is_refused_at_its_deadline_while_another_runs(gated: tuple[Running, Gate]) -> None:
    service, gate = gated
    with connecting(grpc_path(service)) as client:
        first = client.post(infer_message())
        assert client.ask(infer_message(), grpc_timeout="20m").status == DEADLINE_EXCEEDED
        gate.open()
        assert client.wait(first).status == 0


def test_cancelled_call_is_not_run(gated: tuple[Running, Gate]) -> None:
    service, gate = gated
    with connecting(grpc_path(service)) as client:
        first = client.post(infer_message())
        second, third = client.post(infer_message()), client.post(infer_message())
        client.send(frame(RST_STREAM, 0, second, word(CANCEL)), frame(PING, 0, 0, b"12345678"))
        while not client.pongs:
            client.read()
        gate.open()
        assert client.wait(first).status == client.wait(third).status == 0
    (served,) = service.call(service.service.registry.models.served)
    assert served.metrics.cancelled == 1


def test_long_response_waits_for_the_window_and_blocks_no_other_stream(service: Running) -> None:
    with connecting(grpc_path(service), setting(INITIAL_WINDOW_SIZE, 100)) as client:
        long = client.post(infer_message(LONG))
        short = client.ask(infer_message())
        assert short.status == 0
        assert len(client.reply(long).data) == 100
        client.send(frame(WINDOW_UPDATE, 0, long, word(1 << 30)))
        while len(client.reply(long).data) < 60_000:  # now the window of the connection holds it up
            client.read()
        client.send(frame(WINDOW_UPDATE, 0, 0, word(1 << 30)))
        assert np.array_equal(client.wait(long).array(), LONG @ WEIGHT)


def test_long_request_gets_credit_as_it_is_read(client: GrpcClient) -> None:
    x = np.ones((300_000, 4), np.float32)  # 4.8 MB
    stream = client.begin()
    body, sent, window = wrap(infer_message(x)), 0, 1 << 20
    while sent < len(body):
        size = min(len(body) - sent, window + client.credit.get(stream, 0) - sent, 1 << 20)
        if not size:
            client.read()
            continue
        client.send(
            frame(DATA, END_STREAM if sent + size == len(body) else 0, stream, body[sent : sent + size])
        )
        sent += size
    assert np.array_equal(client.wait(stream).array(), x @ WEIGHT)


def test_padding_fragments_and_unknown_frames_are_read(client: GrpcClient) -> None:
    block = client.encoder.encode(head_fields())
    client.send(
        frame(0x77, 0xFF, 5, b"of an extension"),
        frame(HEADERS, PADDED, 1, bytes((3,)) + block[:5] + bytes(3)),
        *(frame(9, 0, 1, block[at : at + 1]) for at in range(5, 15)),
        frame(9, END_HEADERS, 1, block[15:]),
    )
    body = wrap(infer_message())
    for at in range(0, len(body), 7):
        client.send(frame(DATA, PADDED, 1, bytes((4,)) + body[at : at + 7] + bytes(4)))
    client.send(frame(DATA, END_STREAM, 1))
    assert client.wait(1).array().tobytes() == Y


def test_more_streams_than_allowed_are_refused_alone(maker: PackageMaker, tmp_path: Path) -> None:
    with (
        running_grpc(maker, tmp_path, grpc={"max_streams": 2}) as service,
        connecting(grpc_path(service)) as client,
    ):
        first, second, third = (client.begin() for _ in range(3))
        assert client.wait(third).reset == REFUSED_STREAM
        for stream in (first, second):
            client.send(frame(DATA, END_STREAM, stream, wrap(infer_message())))
            assert client.wait(stream).status == 0


# Streams


def test_stream_answers_in_the_order_of_its_requests(client: GrpcClient) -> None:
    stream = client.begin(STREAM)
    for number in range(50):
        message = infer_message(np.full((1, 4), number, np.float32), id=str(number))
        if number == 7:
            message = infer_message(model="other")
        client.send(frame(DATA, 0, stream, wrap(message)))
    client.send(frame(DATA, END_STREAM, stream))
    reply = client.wait(stream)
    messages = reply.messages("ModelStreamInferResponse")
    assert (reply.status, len(messages)) == (0, 50)
    assert "unknown" in messages[7]["error_message"]
    for number in {*range(50)} - {7}:
        answer = messages[number]["infer_response"]
        expected = np.full((1, 4), number, np.float32) @ WEIGHT
        assert (answer["id"], answer["raw_output_contents"]) == (str(number), [expected.tobytes()])


def test_stream_in_one_piece_is_answered_and_others_have_their_turn(client: GrpcClient) -> None:
    stream = client.begin(STREAM)
    body = wrap(infer_message()) * 300
    for at in range(0, len(body), 16_384):
        client.send(frame(DATA, 0, stream, body[at : at + 16_384]))
    client.send(frame(DATA, END_STREAM, stream))
    assert client.ask(infer_message()).status == 0
    assert len(client.wait(stream).messages("ModelStreamInferResponse")) == 300


def test_stream_whose_client_reads_nothing_is_held_up(service: Running) -> None:
    """Its requests are not read on, so that its responses cannot fill the memory."""
    with connecting(grpc_path(service), setting(INITIAL_WINDOW_SIZE, 0)) as client:
        stream = client.begin(STREAM)
        body = wrap(infer_message(np.ones((20_000, 4), np.float32)))  # 320 kB in, 160 kB out
        sent, count = 0, 40
        pieces = body * count
        while sent < len(pieces):
            window = (1 << 20) + client.credit.get(stream, 0) - sent
            size = min(window, len(pieces) - sent, 1 << 20)
            if size <= 0:
                break
            client.send(frame(DATA, 0, stream, pieces[sent : sent + size]), frame(PING, 0, 0, bytes(8)))
            sent += size
            pongs = len(client.pongs)
            while len(client.pongs) == pongs:
                client.read()
        queued = service.call(lambda: service.service.http.sending_bytes)
        assert queued < 6 << 20
        client.send(frame(WINDOW_UPDATE, 0, 0, word(1 << 30)), frame(WINDOW_UPDATE, 0, stream, word(1 << 30)))
        while sent < len(pieces):
            size = min((1 << 20) + client.credit.get(stream, 0) - sent, len(pieces) - sent, 1 << 20)
            if size <= 0:
                client.read()
                continue
            client.send(frame(DATA, 0, stream, pieces[sent : sent + size]))
            sent += size
        client.send(frame(DATA, END_STREAM, stream))
        assert len(client.wait(stream).messages("ModelStreamInferResponse")) == count


def test_stream_that_is_held_up_takes_many_small_pieces(client: GrpcClient) -> None:
    client.send(frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 0)))
    stream = client.begin(STREAM)
    long = wrap(infer_message(np.ones((30_000, 4), np.float32))) * 5  # 240 kB out each
    for at in range(0, len(long), 1 << 14):
        while (1 << 20) + client.credit.get(stream, 0) < at + (1 << 14):
            client.read()
        client.send(frame(DATA, 0, stream, long[at : at + (1 << 14)]))
    pieces = wrap(infer_message()) * 200
    client.send(*(frame(DATA, 0, stream, pieces[at : at + 1]) for at in range(len(pieces))))
    client.send(frame(DATA, END_STREAM, stream))
    client.send(frame(WINDOW_UPDATE, 0, stream, word(1 << 30)), frame(WINDOW_UPDATE, 0, 0, word(1 << 24)))
    assert len(client.wait(stream).messages("ModelStreamInferResponse")) == 205


def test_stream_goes_on_once_its_client_opens_the_window(client: GrpcClient) -> None:
    """Although the socket takes all at once, and never becomes writable again."""
    client.send(frame(SETTINGS, 0, 0, setting(INITIAL_WINDOW_SIZE, 0)))
    stream = client.begin(STREAM)
    body = wrap(infer_message(np.ones((8_000, 4), np.float32)))  # 128 kB in, 64 kB out
    for _ in range(40):
        sent = 0
        while sent < len(body):
            window = (1 << 20) + client.credit.get(stream, 0) - client.sent_bytes
            size = min(len(body) - sent, window, 16_384)
            if size <= 0:
                client.send(frame(WINDOW_UPDATE, 0, stream, word(100_000)))
                client.read()
                continue
            client.send(frame(DATA, 0, stream, body[sent : sent + size]))
            client.sent_bytes += size
            sent += size
    client.send(frame(WINDOW_UPDATE, 0, stream, word(1 << 28)), frame(DATA, END_STREAM, stream))
    assert len(client.wait(stream).messages("ModelStreamInferResponse")) == 40


# Access, ending


def test_token_and_web_pages_are_checked_as_over_http(
    maker: PackageMaker, tmp_path: Path, token_file: Path
) -> None:
    listen = {"token_file": str(token_file)}
    with running_grpc(maker, tmp_path, listen=listen, grpc={"port": 0}) as service:
        with socket.create_connection(("127.0.0.1", grpc_port(service)), 60) as connected:
            client = GrpcClient(connected)
            assert client.ask(infer_message()).status == UNAUTHENTICATED
            assert client.ask(infer_message(), authorization=f"Bearer {TOKEN}").status == 0
            assert client.ask(infer_message(), authorization="Bearer no").status == UNAUTHENTICATED
            reply = client.ask(infer_message(), authorization=f"Bearer {TOKEN}", origin="http://evil")
            assert reply.status == PERMISSION_DENIED
        with connecting(grpc_path(service)) as local:
            assert local.ask(infer_message()).status == 0


def test_tls_speaks_h2_by_the_same_certificate(
    maker: PackageMaker, tmp_path: Path, token_file: Path, certificate: tuple[Path, Path]
) -> None:
    listen = {
        "tls_certificate": str(certificate[0]),
        "tls_key": str(certificate[1]),
        "token_file": str(token_file),
    }
    with running_grpc(maker, tmp_path, listen=listen, grpc={"port": 0}) as service:
        context = ssl.create_default_context(cafile=str(certificate[0]))
        context.set_alpn_protocols(["h2"])
        plain = socket.create_connection(("127.0.0.1", grpc_port(service)), 60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted:
            assert encrypted.selected_alpn_protocol() == "h2"
            client = GrpcClient(encrypted)
            reply = client.ask(infer_message(), authorization=f"Bearer {TOKEN}")
            assert reply.array().tobytes() == Y
            assert np.array_equal(
                client.ask(infer_message(LONG[:10_000]), authorization=f"Bearer {TOKEN}").array(),
                LONG[:10_000] @ WEIGHT,
            )


def test_drain_answers_what_is_under_way_and_refuses_more(gated: tuple[Running, Gate]) -> None:
    service, gate = gated
    with connecting(grpc_path(service)) as client, connecting(grpc_path(service)) as idle:
        open_stream = idle.begin(STREAM)
        idle.ask(b"", "ServerLive")
        stream = client.post(infer_message())
        service.call(lambda: asyncio.ensure_future(service.service.http.drain(60)))
        assert idle.wait_for_goaway()[0] == 0
        assert idle.wait(open_stream).status == UNAVAILABLE
        assert idle.is_closed()
        assert client.wait_for_goaway()[0] == 0
        assert client.wait(client.begin()).reset == REFUSED_STREAM
        gate.open()
        assert client.wait(stream).array().tobytes() == Y
        assert client.is_closed()


def test_isolated_model_answers_over_grpc(maker: PackageMaker, tmp_path: Path) -> None:
    models = {"linear": ModelOptions(isolated=True)}
    with running_grpc(maker, tmp_path, models=models) as service, connecting(grpc_path(service)) as client:
        for _ in range(3):
            assert client.ask(infer_message()).array().tobytes() == Y
        reply = client.ask(infer_message(inputs=[{**TENSOR, "shape": [1, 3]}]))
        assert (reply.status, "shape" in reply.text) == (INVALID_ARGUMENT, True)
        stream = client.begin(STREAM)
        client.send(frame(DATA, END_STREAM, stream, wrap(infer_message()) * 3))
        assert len(client.wait(stream).messages("ModelStreamInferResponse")) == 3


def test_call_for_each_method_is_counted_as_over_http(client: GrpcClient, service: Running) -> None:
    before = service.call(lambda: dict(service.service.http.error_counts))
    client.ask(infer_message(model="other"))
    after = service.call(lambda: dict(service.service.http.error_counts))
    assert after[404] == before.get(404, 0) + 1
