"""`edgekit inspect FILE.tflite`: interface, operators and precision of a model, and why a file is refused."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.toolkit.command_run import invoker
from tests.toolkit.small_tflite import Lite, small_cnn

from edgekit_cli.inspect import command
from edgekit_runtime.errors import ModelError
from edgekit_runtime.sessions import EngineMissingError
from edgekit_toolkit.importers.tflite.importer import load_tflite
from edgekit_toolkit.tflite.flatbuffer import schema

SHARED = Path(__file__).resolve().parents[3] / "shared" / "models" / "models"

invoke = invoker(command)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "net.tflite"
    path.write_bytes(small_cnn().content())
    return path


def quantized() -> Path:
    path = SHARED / "resnet8_cifar10_int8.tflite"
    if not path.is_file():
        pytest.skip(f"{path.name} is not here: ../shared/models is absent")
    return path


def test_float_model_is_shown_with_operators_and_layers(path: Path) -> None:
    text = " ".join(invoke(path).stdout.split())
    for part in (
        "net.tflite, a LiteRT model",
        f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}",
        "Inputs x float32 [1, 8, 8, 3]",
        "Outputs y float32",
        "fp32 3 layers",
        "CONV_2D 1",
        "0 of 7 operators compute with 8- or 16-bit codes",
        "float: quantized when it is packaged",
    ):
        assert part in text


def test_model_with_sparse_weights_is_shown(tmp_path: Path) -> None:
    weight = np.array([[0, 0, 3, 0], [0, 5, 0, 0]], np.float32)
    lite = Lite()
    lite.tensor("x", [1, 4])
    stored = lite.tensor("w", weight.shape, data=weight[weight != 0])
    stored.sparsity = sparsity(weight)
    lite.tensor("dense", weight.shape)
    lite.tensor("y", [1, 2])
    lite.operator("DENSIFY", ["w"], ["dense"], "DensifyOptions")
    lite.operator("FULLY_CONNECTED", ["x", "dense", ""], ["y"], "FullyConnectedOptions")
    lite.ends(["x"], ["y"])
    path = tmp_path / "sparse.tflite"
    path.write_bytes(lite.content())
    text = " ".join(invoke(path).stdout.split())
    assert "FULLY_CONNECTED 1" in text and "DENSIFY 1" in text


def test_nan_among_sparse_weights_is_refused(tmp_path: Path) -> None:
    weight = np.array([[0, np.nan], [1, 0]], np.float32)
    lite = Lite()
    lite.tensor("x", [2, 2])
    lite.tensor("w", weight.shape, data=weight[weight != 0]).sparsity = sparsity(weight)
    lite.tensor("dense", weight.shape)
    lite.operator("DENSIFY", ["w"], ["dense"], "DensifyOptions")
    lite.ends(["x"], ["dense"])
    (tmp_path / "sparse.tflite").write_bytes(lite.content())
    with pytest.raises(ModelError, match="tensor 1 'w': 1 NaN"):
        load_tflite(tmp_path / "sparse.tflite")


def sparsity(weight: NDArray[np.float32]) -> Any:
    """The places of the values in compressed rows."""
    rows, columns = schema.DimensionMetadataT(), schema.DimensionMetadataT()
    rows.format, rows.denseSize = schema.DimensionType.DENSE, weight.shape[0]
    columns.format = schema.DimensionType.SPARSE_CSR
    ends = np.concatenate([[0], np.cumsum(np.count_nonzero(weight, axis=1))])
    for field, values in (("Segments", ends), ("Indices", np.nonzero(weight)[1])):
        vector = schema.Int32VectorT()
        vector.values = values.astype(np.int32)
        setattr(columns, f"array{field}", vector)
        setattr(columns, f"array{field}Type", schema.SparseIndexVector.Int32Vector)
    made = schema.SparsityParametersT()
    made.traversalOrder, made.blockMap, made.dimMetadata = [0, 1], [], [rows, columns]
    return made


def test_quantized_model_is_shown_with_what_its_codes_stand_for() -> None:
    text = " ".join(invoke(quantized()).stdout.split())
    assert "int8 [free, 32, 32, 3], 1 * (code + 128)" in text
    assert "int8 10 layers" in text
    assert "quantized already: packaged as it is" in text


def test_lines_fit_into_80_columns(path: Path) -> None:
    assert max(map(len, invoke(path).stdout.splitlines())) <= 80


def test_json_has_interface_layers_and_operators(path: Path) -> None:
    document = json.loads(invoke(path, "--json").stdout)
    assert document["path"] == str(path)
    assert document["bytes"] == path.stat().st_size
    assert document["inputs"] == [
        {"name": "x", "dtype": "float32", "shape": [1, 8, 8, 3], "scale": None, "zero_point": None}
    ]
    assert document["operators"]["CONV_2D"] == 1
    assert document["layers"][0] == {"name": "a", "precision": "fp32", "weight_bytes": 4 * (6 * 27 + 6)}
    assert document["quantized"] is False


def test_model_without_its_suffix_is_known_by_its_bytes(path: Path) -> None:
    other = path.rename(path.with_suffix(".bin"))
    assert json.loads(invoke(other, "--json").stdout)["subgraphs"] == 1


def test_other_file_of_that_name_is_refused_with_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "net.tflite"
    path.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelError, match=r"net\.tflite: is no \.tflite model: a ZIP archive"):
        invoke(path)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"none\.tflite: no such file; check the path"):
        invoke(tmp_path / "none.tflite")


def test_scales_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    lite = small_cnn()
    lite.quantize("conv_w", [0.1] * 6, [0] * 6, axis=7)
    path = tmp_path / "net.tflite"
    path.write_bytes(lite.content())
    with pytest.raises(ModelError, match=r"net\.tflite: .*conv_w"):
        invoke(path)


def test_without_litert_the_extra_is_named(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("edgekit_toolkit.importers.tflite")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "edgekit_toolkit.tflite.flatbuffer", raising=False)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)
    with pytest.raises(EngineMissingError, match="litert-host"):
        invoke(path)
