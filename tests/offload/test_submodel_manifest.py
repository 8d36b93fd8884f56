"""Submodels in a manifest: round trip, hostile values, and readers that do not know them."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import ManifestError, PackageError
from edgekit_runtime.package.golden import Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import Artifact, BackendChoice, Manifest, Submodel, parse_manifest
from edgekit_runtime.package.submodels import MAX_SUBMODELS
from edgekit_runtime.tensors import TensorSpec

X, Y = TensorSpec("x", "float32", ("N", 4)), TensorSpec("y", "float32", ("N", 2))
GOLDEN = Golden(
    (GoldenInput("x", "float32", (1, 4), "golden/x.bin"),),
    (GoldenOutput(name="y", dtype="float32", shape=(1, 2), path="golden/y.bin", atol=0.1, rtol=0.0),),
)
TAIL = Submodel(
    "cut1.tail", (X,), (Y,), BackendChoice("ort", "submodels/tail.onnx", {"weights": "model.onnx"}), GOLDEN
)


def artifact(path: str, size_bytes: int, role: str, digit: str = "0") -> Artifact:
    return Artifact(path, size_bytes, digit * 64, role)


def manifest_with(*submodels: Submodel) -> Manifest:
    return Manifest(
        name="digits",
        version="1.0.0",
        target="x86-64",
        inputs=(X,),
        outputs=(Y,),
        artifacts=(
            artifact("golden/x.bin", 16, "golden"),
            artifact("golden/y.bin", 8, "golden"),
            artifact("model.onnx", 100, "model", "1"),
            artifact("submodels/tail.onnx", 50, "submodel", "2"),
        ),
        backend=BackendChoice("ort", "model.onnx"),
        golden=GOLDEN,
        submodels=submodels,
    )


def ort(artifact: str, **options: Any) -> dict[str, Any]:
    return {"name": "ort", "artifact": artifact, "options": options, "fallback": None}


def change(**fields: Any) -> bytes:
    """A manifest whose submodel has other fields."""
    document = json.loads(manifest_with(TAIL).to_bytes())
    document["submodels"][0] |= fields
    return encode_json(document)


def test_submodels_come_back_as_they_were() -> None:
    manifest = manifest_with(TAIL)
    assert parse_manifest(manifest.to_bytes()) == manifest


def test_manifest_without_submodels_has_no_such_field() -> None:
    assert b"submodels" not in manifest_with().to_bytes().replace(b"submodels/tail.onnx", b"")


def test_unknown_fields_of_a_submodel_are_kept() -> None:
    data = change(later=[1, 2])
    assert parse_manifest(data).to_bytes() == data


def test_older_reader_sees_the_whole_model_alone() -> None:
    document = json.loads(manifest_with(TAIL).to_bytes())
    document["unknown_to_this_reader"] = document.pop("submodels")
    manifest = parse_manifest(encode_json(document))
    assert manifest.submodels == ()
    assert manifest.backend == BackendChoice("ort", "model.onnx")


@cases(
    ("fields", "message"),
    [
        ({"name": "../up"}, "submodel name"),
        ({"name": 7}, "submodel name"),
        ({"inputs": []}, "inputs is empty"),
        ({"outputs": [Y.to_json(), Y.to_json()]}, "holds a name twice"),
        ({"backend": ort("model.onnx")}, "role 'submodel'"),
        ({"backend": ort("submodels/tail.onnx", weights=5)},
         "weights must be a path"),
        ({"backend": ort("submodels/tail.onnx", weights="/etc/passwd")}, "role 'model'"),
        ({"backend": ort("submodels/tail.onnx", weights="golden/x.bin")}, "role 'model'"),
        ({"inputs": [TensorSpec("z", "float32", ("N", 4)).to_json()]}, "golden inputs"),
        ({"golden": {"inputs": [], "outputs": []}}, "golden inputs"),
    ],
)  # fmt: skip
def test_hostile_submodel_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_manifest(change(**fields))


@cases("value", [None, 5, {}, [5], [{}], [[]]])
def test_submodels_of_another_type_are_refused(value: object) -> None:
    document = json.loads(manifest_with(TAIL).to_bytes())
    document["submodels"] = value
    with pytest.raises(ManifestError):
        parse_manifest(encode_json(document))


def test_two_submodels_of_one_name_are_refused() -> None:
    with pytest.raises(ManifestError, match="twice"):
        manifest_with(TAIL, TAIL)


def test_too_many_submodels_are_refused() -> None:
    with pytest.raises(ManifestError):
        manifest_with(*(replace(TAIL, name=f"t{i}") for i in range(MAX_SUBMODELS + 1)))


def test_served_name_changes_with_graph_and_weights() -> None:
    names = set()
    for path in (None, "model.onnx", "submodels/tail.onnx"):
        manifest = manifest_with(TAIL)
        artifacts = tuple(
            replace(one, sha256="f" * 64) if one.path == path else one for one in manifest.artifacts
        )
        names.add(replace(manifest, artifacts=artifacts).select_submodel("cut1.tail").name)
    assert len(names) == 3


def test_served_name_changes_with_what_the_server_decodes() -> None:
    decoding = replace(TAIL.backend, options={**TAIL.backend.options, "decode": {"x": "jpeg"}})
    names = {
        manifest_with(one).select_submodel("cut1.tail").name
        for one in (TAIL, replace(TAIL, backend=decoding))
    }
    assert len(names) == 2


def test_submodel_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(PackageError, match=r"there are: cut1\.tail"):
        manifest_with(TAIL).select_submodel("cut2.tail")
