"""Packages that carry several variants of one model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from edgekit_runtime.autotune.tournament import hold_tournament
from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError, ManifestError, PackageError
from edgekit_runtime.package.archive import OpenedPackage, read_package, write_package
from edgekit_runtime.package.golden import Golden, GoldenOutput
from edgekit_runtime.package.manifest import BackendChoice, Manifest, Variant, parse_manifest
from edgekit_runtime.package.variants import MAX_VARIANTS
from edgekit_runtime.sessions import EngineMissingError, open_preferred, open_session
from edgekit_runtime.sessions.local_results import keep_winner
from edgekit_runtime.sessions.selftest import run_selftest
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import find_keys_folder, load_signer

pytestmark = pytest.mark.usefixtures("copied_children_of_test")

# What the variant's model makes of the golden input: twice the default's.
DOUBLE = 2.0


def scaled_model(factor: float, width: int = 4, batch: object = "N", only: int | None = None) -> bytes:
    """Y[N, 2] = X[N, width] @ W * factor, with the W of the default model; with `only`, for that N alone."""
    onnx = pytest.importorskip("onnx")
    weight = np.resize(np.float32([[1, 2], [3, 4], [5, 6], [7, 8]]), (width, 2)) * np.float32(factor)
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    nodes = [helper.make_node("MatMul", ["x" if only is None else "r", "w"], ["y"])]
    stored = [onnx.numpy_helper.from_array(weight, "w")]
    if only is not None:
        nodes.insert(0, helper.make_node("Reshape", ["x", "s"], ["r"]))
        stored.append(onnx.numpy_helper.from_array(np.int64([only, width]), "s"))
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", float32, [batch, width])],
        [helper.make_tensor_value_info("y", float32, [batch, 2])],
        stored,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    data: bytes = model.SerializeToString()
    return data


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def contents(maker: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Artifacts of a package with two variants that share the golden input."""
    expected = np.frombuffer(maker.artifacts["golden/y.bin"], np.float32) * np.float32(DOUBLE)
    added = {
        "variants/double/model.onnx": (scaled_model(DOUBLE), "model"),
        "variants/double/output0.bin": (expected.tobytes(), "golden"),
    }
    for path, (_, role) in added.items():
        monkeypatch.setitem(maker.roles, path, role)
    return {**maker.artifacts, **{path: content for path, (content, _) in added.items()}}


@pytest.fixture
def double(maker: Any) -> Variant:
    output = GoldenOutput(
        name="y", dtype="float32", shape=(1, 2), path="variants/double/output0.bin", atol=1e-5, rtol=1e-5
    )
    return Variant(
        "double",
        BackendChoice("ort", "variants/double/model.onnx", {"threads": 1}),
        Golden(maker.manifest().golden.inputs, (output,)),
        {"accuracy": 0.5},
    )


@pytest.fixture
def manifest(maker: Any, contents: dict[str, bytes], double: Variant) -> Manifest:
    made: Manifest = maker.manifest(contents, variants=(double,))
    return made


@pytest.fixture
def write(maker: Any, contents: dict[str, bytes], tmp_path: Path) -> Callable[[Manifest], OpenedPackage]:
    def write(manifest: Manifest) -> OpenedPackage:
        path = tmp_path / "two.edgepkg"
        write_package(path, manifest, contents, maker.signer)
        return read_package(path, maker.trust)

    return write


def test_package_without_variants_has_the_bytes_that_it_always_had(maker: Any) -> None:
    manifest = maker.manifest()
    assert b"variants" not in manifest.to_bytes()
    assert [variant.name for variant in manifest.all_variants] == ["default"]
    assert manifest.select("default") == manifest


def test_variants_survive_a_round_trip_with_fields_of_a_newer_writer(
    manifest: Manifest, double: Variant
) -> None:
    newer = replace(manifest, variants=(replace(double, extra={"later": [1]}),))
    read = parse_manifest(newer.to_bytes())
    assert read == newer
    assert [variant.name for variant in read.all_variants] == ["default", "double"]
    assert read.all_variants[1].extra == {"later": [1]}
    assert read.select("double").figures == {"accuracy": 0.5}


def test_reader_that_knows_no_variants_finds_the_default_where_it_always_was(manifest: Manifest) -> None:
    alone, both = (json.loads(one.to_bytes()) for one in (replace(manifest, variants=()), manifest))
    assert both.pop("variants")[0]["name"] == "double"
    assert both == alone


def test_each_variant_opens_and_passes_its_own_selftest_only(
    manifest: Manifest, write: Callable[[Manifest], OpenedPackage]
) -> None:
    with write(manifest) as package:
        feeds = {"x": np.ones((3, 4), np.float32)}
        for name, own, other in (("default", 1.0, "double"), ("double", DOUBLE, "default")):
            session = open_session(package, variant=name)
            np.testing.assert_allclose(session.run(feeds)["y"], own * np.float32([[16, 20]] * 3))
            assert run_selftest(session, package.select(name)).passed
            assert not run_selftest(session, package.select(other)).passed
        assert open_preferred(package)[0] == "default"


def test_unknown_variant_is_refused_with_those_that_there_are(
    manifest: Manifest, write: Callable[[Manifest], OpenedPackage]
) -> None:
    with write(manifest) as package:
        for ask in (package.select, lambda name: open_session(package, variant=name)):
            with pytest.raises(PackageError, match=r"no variant 'triple'.* there are: default, double"):
                ask("triple")


def test_variant_stands_in_for_a_default_whose_engine_is_missing(
    manifest: Manifest, write: Callable[[Manifest], OpenedPackage]
) -> None:
    absent = BackendChoice("absent", "model.onnx")
    with write(replace(manifest, backend=absent)) as package:
        name, session = open_preferred(package)
        assert name == "double"
        assert run_selftest(session, package.select(name)).passed
        with pytest.raises(EngineMissingError, match=r"no backend 'absent'"):
            open_session(package, variant="default")


def test_every_reason_is_given_where_no_variant_has_an_engine(
    manifest: Manifest, double: Variant, write: Callable[[Manifest], OpenedPackage]
) -> None:
    absent = BackendChoice("absent", "model.onnx")
    variants = (replace(double, backend=replace(absent, name="gone")),)
    with (
        write(replace(manifest, backend=absent, variants=variants)) as package,
        pytest.raises(EngineMissingError, match=r"no backend 'absent'.*another variant: no backend 'gone'"),
    ):
        open_session(package)


def test_kept_variant_is_opened_first(manifest: Manifest, write: Callable[[Manifest], OpenedPackage]) -> None:
    with write(manifest) as package:
        keep_winner(package.manifest, "double", 0)
        assert open_preferred(package)[0] == "double"
        assert run_selftest(open_session(package), package.select("double")).passed


def test_other_variant_serves_where_the_engine_of_the_kept_one_has_gone(
    manifest: Manifest, double: Variant, write: Callable[[Manifest], OpenedPackage]
) -> None:
    gone = replace(double, backend=replace(double.backend, name="absent"))
    with write(replace(manifest, variants=(gone,))) as package:
        keep_winner(package.manifest, "double", 0)
        assert open_preferred(package)[0] == "default"


def test_tournament_of_the_device_contests_all_variants_and_keeps_one(
    manifest: Manifest,
    double: Variant,
    contents: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    wrong = replace(double, name="wrong", golden=manifest.golden)
    path = tmp_path / "x.edgepkg"
    write_package(path, replace(manifest, variants=(double, wrong)), contents, load_signer())
    assert main(["tournament", "--json", "--seconds", "0.1", str(path)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [(one["variant"], one["reason"] is None) for one in document["engines"]] == [
        ("default", True), ("double", True), ("wrong", False),
    ]  # fmt: skip
    assert "fails the self-test" in document["engines"][2]["reason"]
    winner = next(one for one in document["engines"] if one["name"] == document["winner"])
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        assert open_preferred(package)[0] == winner["variant"]


def test_variant_that_fails_on_the_inputs_of_the_contest_takes_no_part(
    maker: Any,
    manifest: Manifest,
    double: Variant,
    contents: dict[str, bytes],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Its own golden input is a batch of two, and its model works with no other, whatever it states."""
    monkeypatch.setitem(maker.roles, "variants/double/x.bin", "golden")
    (golden_input,), (output,) = double.golden.inputs, double.golden.outputs
    pair = Golden(
        (replace(golden_input, shape=(2, 4), path="variants/double/x.bin"),),
        (replace(output, shape=(2, 2)),),
    )
    contents = {
        **contents,
        "variants/double/model.onnx": scaled_model(DOUBLE, only=2),
        "variants/double/x.bin": contents["golden/x.bin"] * 2,
        "variants/double/output0.bin": contents["variants/double/output0.bin"] * 2,
    }
    path = tmp_path / "pair.edgepkg"
    changed = maker.manifest(contents, variants=(replace(double, golden=pair),))
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    write_package(path, changed, contents, load_signer())
    with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
        result = hold_tournament(package, find_keys_folder(), seconds=0.1)
    assert result.winner is not None
    assert result.winner.setting.variant == "default"
    assert "onnxruntime" in str(result.entrants[1].reason)


def test_every_byte_of_a_package_with_variants_is_covered(
    maker: Any, manifest: Manifest, write: Callable[[Manifest], OpenedPackage]
) -> None:
    from tests.runtime.test_package_flips import undetected

    path = write(manifest).path
    flips = ((offset, 1 << (offset % 8)) for offset in range(path.stat().st_size))
    assert undetected(path, maker, flips) == []


def hostile(manifest: Manifest, change: Callable[[dict[str, Any]], object]) -> bytes:
    from edgekit_runtime.canonical_json import encode_json

    document = json.loads(manifest.to_bytes())
    change(document["variants"][0])
    return encode_json(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.update(name="default"), "the name default stands twice"),
        (lambda one: one.update(name="../up"), "variant name is '../up'"),
        (lambda one: one.update(name=3), "variant name is 3"),
        (lambda one: one.pop("golden"), r"variants\[0\]: field 'golden' is missing"),
        (lambda one: one.pop("figures"), r"variants\[0\]: field 'figures' is missing"),
        (lambda one: one.update(figures=[]), "variant 'double': figures must be an object"),
        (lambda one: one.update(backend=None), r"variants\[0\].backend: is null"),
        (
            lambda one: one["backend"].update(artifact="model2.onnx"),
            "variant 'double': backend 'ort' names 'model2.onnx', which is no artifact of role 'model'",
        ),
        (
            lambda one: one["backend"].update(artifact="golden/y.bin"),
            "no artifact of role 'model'",
        ),
        (
            lambda one: one["golden"]["outputs"][0].update(path="model.onnx"),
            "variant 'double': golden tensor 'y' names 'model.onnx', which is no artifact of role 'golden'",
        ),
        (
            lambda one: one["golden"]["outputs"][0].update(path="golden/x.bin"),
            "variant 'double': golden tensor 'y': artifact 'golden/x.bin' has 4 bytes, expected 8",
        ),
        (lambda one: one["golden"]["outputs"][0].update(name="z"), r"variant 'double': golden outputs hold"),
        (lambda one: one["golden"]["inputs"].clear(), r"variant 'double': golden inputs are \[\]"),
        (
            lambda one: one["golden"]["outputs"][0].update(shape=[1, 3]),
            r"variant 'double': golden tensor 'y' is float32 \[1, 3\], expected float32",
        ),
    ],
)
def test_malformed_variant_is_refused_by_name(
    change: Callable[[dict[str, Any]], object], message: str, manifest: Manifest
) -> None:
    with pytest.raises(ManifestError, match=message):
        parse_manifest(hostile(manifest, change))


@pytest.mark.parametrize("listed", [None, {}, "double", 3])
def test_variants_that_are_no_list_are_refused(listed: object, manifest: Manifest) -> None:
    from edgekit_runtime.canonical_json import encode_json

    document = {**json.loads(manifest.to_bytes()), "variants": listed}
    with pytest.raises(ManifestError, match=r"field 'variants' is .*, expected a list"):
        parse_manifest(encode_json(document))


def test_name_that_stands_twice_is_refused(manifest: Manifest, double: Variant) -> None:
    with pytest.raises(ManifestError, match="the name double stands twice"):
        replace(manifest, variants=(double, double))


def test_more_variants_than_the_bound_are_refused(manifest: Manifest, double: Variant) -> None:
    from edgekit_runtime.canonical_json import encode_json

    several = [replace(double, name=f"v{index}") for index in range(MAX_VARIANTS + 1)]
    assert replace(manifest, variants=tuple(several[:-1])).variants
    message = f"variants holds {MAX_VARIANTS + 1}, expected at most {MAX_VARIANTS}"
    with pytest.raises(ManifestError, match=message):
        replace(manifest, variants=tuple(several))
    document = json.loads(manifest.to_bytes())
    document["variants"] = [one.to_json() for one in several]
    with pytest.raises(ManifestError, match=message):
        parse_manifest(encode_json(document))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (scaled_model(DOUBLE, width=6), r"takes 'x' of shape \['N', 6\], manifest says \['N', 4\]"),
        (scaled_model(DOUBLE, batch=1), r"takes 'x' of shape \[1, 4\], manifest says \['N', 4\]"),
    ],
)
def test_variant_whose_model_takes_other_inputs_is_refused(
    model: bytes,
    message: str,
    maker: Any,
    contents: dict[str, bytes],
    double: Variant,
    tmp_path: Path,
) -> None:
    contents = {**contents, "variants/double/model.onnx": model}
    path = tmp_path / "other.edgepkg"
    write_package(path, maker.manifest(contents, variants=(double,)), contents, maker.signer)
    with read_package(path, maker.trust) as package:
        open_session(package, variant="default").close()
        with pytest.raises(BackendError, match=message):
            open_session(package, variant="double")
