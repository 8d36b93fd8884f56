import dataclasses
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError, ManifestError
from edgekit_runtime.package.golden import Codes, Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest import BackendChoice, Manifest, parse_manifest
from edgekit_runtime.tensors import TensorSpec


def encode(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.fixture
def document(maker: Any) -> dict[str, Any]:
    """The parsed JSON of a valid manifest, to be changed by a test."""
    backend = BackendChoice("tensorrt", "model.onnx", {}, BackendChoice("ort", "model.onnx", {"threads": 1}))
    value: dict[str, Any] = json.loads(maker.manifest(backend=backend).to_bytes())
    return value


def test_a_manifest_survives_the_round_trip(maker: Any) -> None:
    manifest = maker.manifest()
    assert parse_manifest(manifest.to_bytes()) == manifest


def test_the_document_has_the_documented_fields(document: dict[str, Any]) -> None:
    assert set(document) == {
        "format", "name", "version", "target", "inputs", "outputs", "artifacts", "backend", "preprocessing",
        "labels", "budget", "figures", "golden", "provenance",
    }  # fmt: skip


OBJECTS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "manifest": lambda document: document,
    "format": lambda document: document["format"],
    "input": lambda document: document["inputs"][0],
    "output": lambda document: document["outputs"][0],
    "artifact": lambda document: document["artifacts"][1],
    "backend": lambda document: document["backend"],
    "options": lambda document: document["backend"]["options"],
    "fallback": lambda document: document["backend"]["fallback"],
    "golden": lambda document: document["golden"],
    "golden input": lambda document: document["golden"]["inputs"][0],
    "codes": lambda document: document["golden"]["inputs"][0]["codes"],
    "golden output": lambda document: document["golden"]["outputs"][0],
    "figures": lambda document: document["figures"],
    "provenance": lambda document: document["provenance"],
}


@cases("place", OBJECTS)
def test_an_unknown_field_survives_the_round_trip(place: str, document: dict[str, Any]) -> None:
    OBJECTS[place](document)["x-new"] = {"deep": [1, None, "ü", 0.1]}
    assert parse_manifest(encode(document)).to_bytes() == encode(document)


@cases(
    ("place", "field"),
    [
        *(("manifest", field) for field in ("name", "format", "golden", "labels", "budget", "backend")),
        *(("format", field) for field in ("version", "critical")),
        *(("artifact", field) for field in ("path", "bytes", "sha256", "role")),
        *(("backend", field) for field in ("name", "artifact", "options", "fallback")),
        *(("golden input", field) for field in ("name", "dtype", "shape", "path", "codes")),
        *(("golden output", field) for field in ("path", "atol", "rtol")),
        *(("codes", field) for field in ("dtype", "scale", "offset")),
        ("golden", "inputs"),
        ("input", "shape"),
    ],
)  # fmt: skip
def test_a_missing_field_is_named(place: str, field: str, document: dict[str, Any]) -> None:
    del OBJECTS[place](document)[field]
    with pytest.raises(ManifestError, match=f"'{field}' is missing"):
        parse_manifest(encode(document))


BAD_VALUES: list[tuple[str, str, Any, str]] = [
    ("format", "version", 2, "update edgekit"),
    ("format", "version", 0, "at least 1"),
    ("format", "version", True, "at least 1"),
    ("format", "version", "1", "at least 1"),
    ("format", "critical", ["delta-weights"], "delta-weights.*update edgekit"),
    ("format", "critical", [1], "strings"),
    ("format", "critical", "x", "list"),
    ("manifest", "name", "../x", "name is"),
    ("manifest", "name", "", "name is"),
    ("manifest", "version", None, "version is"),
    ("manifest", "target", "a b", "target is"),
    ("manifest", "inputs", [], "inputs is empty"),
    ("manifest", "outputs", {}, "list"),
    ("manifest", "format", [], "expected an object"),
    ("manifest", "golden", None, "expected an object"),
    ("manifest", "artifacts", [], "no artifact of role 'model'"),
    ("manifest", "artifacts", [7], r"artifacts\[0\].*expected an object"),
    ("manifest", "labels", "model.onnx", "role 'labels'"),
    ("manifest", "preprocessing", ["x"], "role 'preprocessing'"),
    ("manifest", "budget", {"max_bytes": "ten"}, "max_bytes"),
    ("manifest", "budget", {"max_bytes": True}, "max_bytes"),
    ("manifest", "budget", [], "budget"),
    ("manifest", "name", "stats", "name is 'stats', which is where the service has statistics"),
    ("manifest", "name", "x" * 65, "name is 'x+', expected 1 to 64"),
    ("manifest", "name", "-x", "name is '-x'"),
    ("manifest", "provenance", [], "provenance must be an object"),
    ("format", "critical", ["b", "a"], "needs a, b, unknown to this reader"),
    ("artifact", "bytes", True, "bytes is True"),
    ("artifact", "bytes", "8", "bytes is '8'"),
    ("artifact", "sha256", "0" * 63, "sha256 is"),
    ("artifact", "sha256", "0" * 65, "sha256 is"),
    ("manifest", "figures", [], "figures"),
    ("input", "dtype", "float31", "float31"),
    ("input", "shape", [-1, 4], "-1"),
    ("artifact", "path", "../x", "'../x'"),
    ("artifact", "path", "manifest.json", "not sorted|twice"),
    ("artifact", "path", 7, "expected a string"),
    ("artifact", "bytes", -1, "bytes is -1"),
    ("artifact", "bytes", 1.0, "bytes is 1.0"),
    ("artifact", "bytes", 9, "9 bytes, expected 8"),
    ("artifact", "sha256", "A" * 64, "sha256"),
    ("artifact", "sha256", None, "sha256"),
    ("artifact", "role", "model", "role 'golden'"),
    ("artifact", "role", 3, "role is 3"),
    ("backend", "artifact", "labels.txt", "role 'model'"),
    ("backend", "artifact", None, "must be a path"),
    ("backend", "name", "", "backend name"),
    ("backend", "options", None, "options"),
    ("fallback", "artifact", "nowhere.onnx", "nowhere.onnx"),
    ("golden", "inputs", [], "golden inputs"),
    ("golden", "outputs", [], "golden outputs"),
    ("golden input", "shape", ["N", 4], "free dimension"),
    ("golden input", "shape", [1, 5], r"expected float32 \['N', 4\]"),
    ("golden input", "shape", [2, 4], "4 bytes, expected 8 for shape"),
    ("golden input", "shape", [10**30, 4], "dimension 1000"),
    ("golden input", "shape", [10**4299, 4], "dimension 1000"),
    ("golden input", "shape", [2**25 + 1, 4], "536870928 bytes decoded, expected at most 536870912"),
    ("golden input", "dtype", "float64", "float32"),
    ("golden input", "path", "golden/y.bin", "golden/y.bin"),
    ("golden input", "path", None, "path is None"),
    ("golden input", "name", "z", "golden inputs"),
    ("golden output", "name", "z", "which the model does not have"),
    ("golden output", "atol", -1, "atol"),
    ("golden output", "rtol", "0", "rtol"),
    ("golden output", "rtol", 10**400, "rtol"),
    ("codes", "dtype", "uint16", "uint16"),
    ("codes", "scale", None, "scale"),
    *(("codes", "repeat", value, "'repeat' is.*expected a list") for value in (2, "12", {}, False)),
    *(("codes", "repeat", [1, value], "integers of at least 1") for value in (0, -2, True, 2.0, "2", None)),
    *(("codes", "repeat", value, "divisor for each size") for value in ([], [4], [1, 1, 4])),
    *(("codes", "repeat", [1, value], "divisor for each size") for value in (3, 8, 10**400)),
    ("codes", "repeat", [1, 2], "4 bytes, expected 2 for shape"),
    *(("golden output", "every", value, "every is") for value in (0, -1, True, 1.5, 2.0, None, "2", [2])),
    ("golden output", "every", 2, "8 bytes, expected 4 for shape"),
    ("golden output", "every", 10**400, "8 bytes, expected 4 for shape"),
]


@cases(("place", "field", "value", "reason"), BAD_VALUES)
def test_a_wrong_value_is_refused_with_its_place(
    place: str, field: str, value: Any, reason: str, document: dict[str, Any]
) -> None:
    OBJECTS[place](document)[field] = value
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(encode(document))


@cases(
    ("data", "reason"),
    [
        (b"", "not a JSON"),
        (b"[]", "expected an object"),
        (b"\xff{}", "UTF-8"),
        (b'{"a":NaN}', "not a JSON"),
        (b'{"a":1e999}', "not a JSON"),
        (b'{"a":"\\ud800"}', "not a JSON"),
        (b'{"a":1' + b"0" * 5000 + b"}", "not a JSON"),
        (b'{"a":' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": 1}', "not canonical"),
        (b'{"b":1,"a":1}', "not canonical"),
        (b'{"a":1,"a":1}', "not canonical"),
        (b'{"a":1.50}', "not canonical"),
        (b'{"a":"\\u0041"}', "not canonical"),
        (b'{"a":1}\n', "not canonical"),
        (b"{}", "'format' is missing"),
    ],
)
def test_a_document_that_is_not_canonical_json_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(ManifestError, match=reason):
        parse_manifest(data)


def test_unsorted_artifacts_are_refused(document: dict[str, Any]) -> None:
    document["artifacts"].reverse()
    with pytest.raises(ManifestError, match="not sorted"):
        parse_manifest(encode(document))


@pytest.mark.parametrize(("place", "field"), [("manifest", "name"), ("manifest", "version")])
def test_a_word_of_64_characters_is_accepted(place: str, field: str, document: dict[str, Any]) -> None:
    OBJECTS[place](document)[field] = "x" * 64
    assert getattr(parse_manifest(encode(document)), field) == "x" * 64


@pytest.mark.parametrize("limit", [float("inf"), float("-inf"), float("nan")])
def test_a_limit_that_is_not_finite_is_refused(limit: float, maker: Any) -> None:
    with pytest.raises(ManifestError, match=r"budget 'max_latency_ms' is .*, expected a finite number"):
        maker.manifest(budget={"max_latency_ms": limit})


@pytest.mark.parametrize("limit", [0, -1.5, 10**400])
def test_a_limit_that_is_finite_is_accepted(limit: float, maker: Any) -> None:
    assert maker.manifest(budget={"max_latency_ms": limit}).budget == {"max_latency_ms": limit}


@pytest.mark.parametrize("field", ["budget", "figures", "provenance"])
def test_keys_that_are_no_strings_are_refused(field: str, maker: Any) -> None:
    with pytest.raises(ManifestError, match=f"{field} must be an object with string keys, got an object"):
        maker.manifest(**{field: {"a": 1, 7: 1}})


def test_inputs_of_one_name_are_refused_with_the_names(maker: Any) -> None:
    spec = TensorSpec("x", "float32", ("N", 4))
    with pytest.raises(ManifestError, match="inputs holds a tensor name twice: x, x"):
        maker.manifest(inputs=(spec, spec))


def test_a_tensor_name_twice_is_refused(maker: Any) -> None:
    with pytest.raises(ManifestError, match="twice"):
        maker.manifest(outputs=(TensorSpec("y", "float32", (1, 2)),) * 2)


def test_figures_that_are_no_json_are_refused_on_writing(maker: Any) -> None:
    with pytest.raises(ManifestError, match="cannot be written"):
        maker.manifest(figures={"accuracy": float("nan")}).to_bytes()


def chain_of(count: int) -> BackendChoice:
    choice = None
    for index in reversed(range(count)):
        choice = BackendChoice(f"b{index}", "model.onnx", {}, choice)
    assert choice is not None
    return choice


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_chain_of_fallbacks_survives_the_round_trip(count: int, maker: Any) -> None:
    manifest = maker.manifest(backend=chain_of(count))
    read = parse_manifest(manifest.to_bytes())
    assert read == manifest
    assert [choice.name for choice in read.backend.chain] == [f"b{index}" for index in range(count)]


def test_more_than_four_backends_are_refused(maker: Any) -> None:
    with pytest.raises(ManifestError, match="5 choices, expected at most 4"):
        chain_of(5)
    document = json.loads(maker.manifest(backend=chain_of(4)).to_bytes())
    last = document["backend"]
    while last.get("fallback"):
        last = last["fallback"]
    last["fallback"] = {"name": "b4", "artifact": "model.onnx", "options": {}}
    with pytest.raises(ManifestError, match="more than 4 choices"):
        parse_manifest(encode(document))


def test_the_file_name_joins_name_version_and_target(maker: Any) -> None:
    assert maker.manifest().file_name == "linear-1.0.0-x86-64.edgepkg"


def test_a_manifest_cannot_be_changed(maker: Any) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        maker.manifest().name = "other"


def test_codes_decode_with_one_rounding_an_operation() -> None:
    golden = GoldenInput("x", "float32", (3,), "x.bin", Codes("int8", 0.1, 0.3))
    # Computed by hand in float32: 0.1f = 0.100000001490116, 0.3f = 0.300000011920929.
    assert golden.decode(bytes([0xFF, 0, 127])).tolist() == [0.20000001788139343, 0.30000001192092896, 13.0]


def test_values_are_little_endian() -> None:
    golden = GoldenOutput(name="y", dtype="int16", shape=(2,), path="y.bin", atol=0, rtol=0)
    assert golden.decode(b"\x01\x00\x00\x01").tolist() == [1, 256]


def test_golden_values_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="3 bytes, expected 4"):
        GoldenOutput(name="y", dtype="int16", shape=(2,), path="y.bin", atol=0, rtol=0).decode(b"123")


def test_codes_for_integers_are_refused() -> None:
    with pytest.raises(DataError, match="codes need dtype float32"):
        GoldenInput("x", "int8", (2,), "x.bin", Codes("int8", 1, 0))


def test_a_few_codes_that_repeat_to_a_huge_input_are_refused(maker: Any) -> None:
    codes = Codes("uint8", 1.0, 0.0, (2**40, 1))
    golden_input = GoldenInput("x", "float32", (2**40, 4), "golden/x.bin", codes)
    assert golden_input.size_bytes == 4  # what lies in the package
    golden = dataclasses.replace(maker.manifest().golden, inputs=(golden_input,))
    with pytest.raises(ManifestError, match="17592186044416 bytes decoded, expected at most 536870912"):
        maker.manifest(golden=golden)


def test_inputs_that_are_too_large_only_together_are_refused() -> None:
    names, size = ("a", "b", "c"), 2**26  # 256 MiB each
    inputs = tuple(
        GoldenInput(name, "float32", (size,), "x.bin", Codes("int8", 1, 0, (size,))) for name in names
    )
    outputs = (GoldenOutput(name="y", dtype="int16", shape=(2,), path="y.bin", atol=0, rtol=0),)
    specs = tuple(TensorSpec(name, "float32", (size,)) for name in names)
    output_specs = (TensorSpec("y", "int16", (2,)),)
    Golden(inputs[:2], outputs).check(specs[:2], output_specs)
    with pytest.raises(DataError, match="805306368 bytes decoded"):
        Golden(inputs, outputs).check(specs, output_specs)


def test_codes_of_an_empty_input_cannot_repeat() -> None:
    with pytest.raises(DataError, match="'x': codes: repeat"):
        GoldenInput("x", "float32", (0, 4), "x.bin", Codes("int8", 1, 0, (10**30, 1)))


def test_a_repeated_code_fills_its_block() -> None:
    golden = GoldenInput("x", "float32", (1, 4, 6), "x.bin", Codes("uint8", 0.5, -1.0, (1, 2, 3)))
    assert golden.size_bytes == 4
    assert golden.decode(bytes([0, 2, 4, 6])).tolist() == [
        [[-1, -1, -1, 0, 0, 0], [-1, -1, -1, 0, 0, 0], [1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2]]
    ]


def test_repeated_codes_of_another_size_are_refused() -> None:
    golden = GoldenInput("x", "float32", (4, 6), "x.bin", Codes("uint8", 0.5, -1.0, (2, 3)))
    with pytest.raises(DataError, match="24 bytes, expected 4"):
        golden.decode(bytes(24))


@pytest.mark.parametrize(
    ("shape", "every", "stored"),
    [
        ((2, 3), 1, [0, 1, 2, 3, 4, 5]),
        ((2, 3), 2, [0, 2, 4]),
        ((2, 3), 4, [0, 4]),
        ((2, 3), 6, [0]),
        ((2, 3), 10**30, [0]),
        ((), 3, [0]),
        ((0, 3), 2, []),
    ],
)
def test_an_output_is_stored_from_its_first_value_on(
    shape: tuple[int, ...], every: int, stored: list[int]
) -> None:
    golden = GoldenOutput(name="y", dtype="int16", shape=shape, path="y.bin", atol=0, rtol=0, every=every)
    output = np.arange(np.prod(shape), dtype=np.int16).reshape(shape)
    picked = golden.pick(np.asfortranarray(output))  # C order counts, however the values lie in memory
    assert picked.tolist() == stored
    assert golden.size_bytes == 2 * len(stored)
    assert golden.decode(picked.astype("<i2").tobytes()).reshape(-1).tolist() == stored


def test_sampled_values_of_another_size_are_refused() -> None:
    with pytest.raises(DataError, match="6 bytes, expected 4"):
        GoldenOutput(name="y", dtype="int16", shape=(3,), path="y.bin", atol=0, rtol=0, every=2).decode(
            bytes(6)
        )


def test_repeat_and_every_survive_the_round_trip(maker: Any) -> None:
    sampled_manifest: Manifest = maker.sampled_manifest()
    assert parse_manifest(sampled_manifest.to_bytes()) == sampled_manifest
    (golden_input,), (golden_output,) = sampled_manifest.golden.inputs, sampled_manifest.golden.outputs
    assert golden_input.codes is not None
    assert (golden_input.codes.repeat, golden_output.every) == ((1, 2), 2)


def test_repeat_and_every_are_left_out_when_they_say_nothing(document: dict[str, Any]) -> None:
    data = encode(document)
    assert "repeat" not in OBJECTS["codes"](document)
    assert "every" not in OBJECTS["golden output"](document)
    OBJECTS["codes"](document)["repeat"] = None
    OBJECTS["golden output"](document)["every"] = 1
    assert parse_manifest(encode(document)).to_bytes() == data


def add_state(document: dict[str, Any], **state: object) -> dict[str, Any]:
    """Give a manifest the input h and the output hn, float32 [N, 3], and the states that these are."""
    for side, name in (("inputs", "h"), ("outputs", "hn")):
        document[side].append({"name": name, "dtype": "float32", "shape": ["N", 3]})
    golden = {"name": "h", "dtype": "float32", "shape": [1, 3], "path": "golden/x.bin"}
    codes = {"dtype": "uint8", "scale": 1.0, "offset": 0.0, "repeat": [1, 3]}
    document["golden"]["inputs"].append(golden | {"codes": codes, "path": "golden/h.bin"})
    document["artifacts"].insert(
        0, {"path": "golden/h.bin", "bytes": 1, "sha256": "0" * 64, "role": "golden"}
    )
    document["states"] = [{"output": "hn", "input": "h", **state}]
    return document


def test_states_survive_the_round_trip(document: dict[str, Any]) -> None:
    data = encode(add_state(document, newer=1))
    manifest = parse_manifest(data)
    assert [(state.output, state.input) for state in manifest.states] == [("hn", "h")]
    assert manifest.to_bytes() == data


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"output": 1}, "expected the name of a tensor"),
        ({"output": "next"}, "no output is named 'next'"),
        ({"input": "past"}, "no input is named 'past'"),
        ({"output": "y"}, "output 'y' is float32"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(
    state: dict[str, Any], message: str, document: dict[str, Any]
) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_manifest(encode(add_state(document, **state)))
