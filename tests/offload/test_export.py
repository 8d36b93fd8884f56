"""The server's half of a package on other servers: Triton, HAProxy and Kubernetes, and what is refused."""

import json
import os
import shutil
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from tests.offload.export_parts import (
    Exported,
    cached_environment,
    free_port,
    make_package,
    process,
    run,
    wait_ready,
)

from edgekit_offload.export.haproxy import write_haproxy
from edgekit_offload.export.kubernetes import object_name
from edgekit_offload.export.tails import Tail
from edgekit_offload.export.triton import configuration, write_repository
from edgekit_runtime.client import Client
from edgekit_runtime.errors import CutError, EdgekitError
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.commands.offload import command as offload

# onnxruntime differs by rounding between machines and numbers of rows.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return make_package(tmp_path_factory.mktemp("export"))


def export(package: Exported, folder: Path, form: str, *options: str) -> Path:
    arguments = ["export", str(package.path), "--format", form, "--output", str(folder), *options]
    result = CliRunner().invoke(offload, [*arguments, "--keys", str(package.path.parent / "keys"), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["models"] == [package.tail]
    return folder


def make_tail(shape: tuple[int | str, ...], *, is_batched: bool = True, decode: str = "") -> Tail:
    spec = TensorSpec("x", "uint8", shape)
    output = TensorSpec("y", "float16", ("N", 3))
    return Tail(
        "m.tail.0", (spec,), (output,), {"x": decode} if decode else {}, onnx.ModelProto(), is_batched
    )


def test_repository_holds_the_tail_with_its_weights(package: Exported, tmp_path: Path) -> None:
    folder = export(package, tmp_path / "repository", "triton") / package.tail
    assert sorted(path.name for path in folder.rglob("*") if path.is_file()) == ["config.pbtxt", "model.onnx"]
    answer = run(onnx.load(folder / "1/model.onnx"), package.sent)
    np.testing.assert_array_equal(answer["logits"], package.expected["logits"])
    text = (folder / "config.pbtxt").read_text()
    assert f'name: "{package.tail}"' in text
    assert "max_batch_size: 16" in text
    assert "dynamic_batching" in text


@pytest.mark.parametrize(
    ("tail", "parts"),
    [
        (make_tail(("N", 4, "T")), ["max_batch_size: 16", "TYPE_UINT8 dims: [4, -1]", "TYPE_FP16 dims: [3]"]),
        (
            make_tail((1, 4), is_batched=False),
            ["max_batch_size: 0", "TYPE_UINT8 dims: [1, 4]", "dims: [-1, 3]"],
        ),
        (
            make_tail(("N", 8, 8, 3), is_batched=False, decode="jpeg"),
            ["TYPE_UINT8 dims: [-1]", r'"{\"x\": \"jpeg\"}"'],
        ),
    ],
)
def test_configuration_states_shapes_with_and_without_a_batch(tail: Tail, parts: list[str]) -> None:
    text = configuration(tail, "python")
    assert all(part in text for part in parts), text
    assert ("dynamic_batching" in text) == tail.is_batched


def test_photographs_need_the_python_backend(tmp_path: Path) -> None:
    tail = make_tail(("N", 8, 8, 3), is_batched=False, decode="jpeg")
    with pytest.raises(CutError, match="--backend python"):
        write_repository((tail,), tmp_path / "repository", "onnxruntime")
    assert not (tmp_path / "repository").exists()


def test_replica_that_is_no_address_is_refused(tmp_path: Path) -> None:
    for replica in ("host", "ftp://host:1", "host:99999", "http://host:1/path"):
        with pytest.raises(CutError, match="replica"):
            write_haproxy((make_tail(("N", 4)),), tmp_path, (replica,))
    with pytest.raises(CutError, match="no replicas"):
        write_haproxy((make_tail(("N", 4)),), tmp_path, ())


def test_names_of_kubernetes_objects_are_valid() -> None:
    assert object_name("Key_Words.v2") == "key-words-v2"
    assert object_name("3d") == "model-3d"
    assert len(object_name("a" * 99)) == 40


TRITON = "nvidia-pytriton==0.7.0"


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory, package: Exported) -> Iterator[int]:
    """The port of the real Triton, 2.51 as in the wheel, with the repository that was exported."""
    made = os.environ.get("EDGEKIT_TRITON") == "1"
    found = cached_environment(
        "triton",
        TRITON,
        "numpy==1.26.4",
        "onnxruntime",
        "flatbuffers",
        "packaging",
        "protobuf",
        may_make=made,
    )
    if found is None:
        pytest.skip("no Triton in the cache; EDGEKIT_TRITON=1 installs it (170 MB, with onnxruntime 330 MB)")
    folder = tmp_path_factory.mktemp("triton")
    site = next(found.glob("lib/python*/site-packages"))
    home, version = site / "pytriton/tritonserver", f"{sys.version_info.major}.{sys.version_info.minor}"
    backend = shutil.copytree(home / "backends/python", folder / "backends/python")
    stub = home.parent / f"tritonserver/python_backend_stubs/{version}/triton_python_backend_stub"
    if not stub.exists():
        pytest.skip(f"the wheel has no Triton backend for Python {version}")
    shutil.copy(stub, backend)
    repository = export(package, folder / "repository", "triton", "--backend", "python")
    libraries = [
        home / "lib",
        home / "external_libs",
        site / "nvidia_pytriton.libs",
        sysconfig.get_config_var("LIBDIR"),
    ]
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(map(str, libraries)),
        "PATH": f"{found / 'bin'}{os.pathsep}{os.environ['PATH']}",  # its Python ignores PYTHONPATH
    }
    port, log = free_port(), folder / "log"
    argv = [
        *(str(home / "bin/tritonserver"), f"--model-repository={repository}"),
        *(f"--backend-directory={folder / 'backends'}", "--http-address=127.0.0.1", f"--http-port={port}"),
        *("--allow-grpc=false", "--allow-metrics=false", "--exit-timeout-secs=2"),
    ]
    with process(argv, log, env) as child:
        wait_ready(child, port, log)
        yield port


def test_real_triton_answers_our_client_as_the_tail_does_here(triton: int, package: Exported) -> None:
    with Client(f"127.0.0.1:{triton}") as client:
        assert client.ready(package.tail)
        for rows in (1, 8):
            sent = {name: array[:rows] for name, array in package.sent.items()}
            answer = client.infer(package.tail, sent)
            np.testing.assert_allclose(answer["logits"], package.expected["logits"][:rows], **CLOSE)


def test_real_triton_joins_requests_of_several_devices(triton: int, package: Exported) -> None:
    wrong: list[str] = []

    def ask(row: int) -> None:
        sent = {name: array[row : row + 1] for name, array in package.sent.items()}
        with Client(f"127.0.0.1:{triton}") as client:
            for _ in range(30):
                answer = client.infer(package.tail, sent)["logits"]
                if not np.allclose(answer, package.expected["logits"][row : row + 1], **CLOSE):
                    wrong.append(f"row {row}")

    threads = [threading.Thread(target=ask, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_real_triton_refuses_another_version_of_the_tail(triton: int, package: Exported) -> None:
    with Client(f"127.0.0.1:{triton}") as client, pytest.raises(EdgekitError):
        client.infer(package.tail[:-1] + "x", package.sent)
