"""`edgekit inspect`: all that a package holds, in 80 columns, and loudly when its key is not trusted."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from onnx import helper
from tests.toolkit.command_run import invoker
from tests.toolkit.package_run import tensor
from tests.toolkit.package_sample import make_model, write_linear, write_model

from edgekit_cli.inspect import command
from edgekit_runtime.errors import DigestError, PackageError, SignatureError
from edgekit_runtime.package.golden import Codes, Golden, GoldenInput, GoldenOutput
from edgekit_runtime.package.manifest_entries import BackendChoice
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.packaging.evidence import evidence_path, write_evidence
from edgekit_toolkit.packaging.signing_keys import StatementSigner, load_signer

HOSTILE = "[red]x[/red] :smile: \x1b[31m\nUNVERIFIED \u202e"


pytestmark = pytest.mark.usefixtures("new_home")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "linear-1.0.0-x86-64.edgepkg"


@pytest.fixture
def strange_signer(tmp_path: Path) -> StatementSigner:
    return load_signer(folder=tmp_path / "stranger")


invoke = invoker(command)


def flat(result: Result) -> str:
    return " ".join(result.stdout.split())


def test_what_a_package_states_is_shown(path: Path) -> None:
    write_linear(
        path,
        backend=BackendChoice("tensorrt", "model.onnx", {"fp16": True}, BackendChoice("ort", "model.onnx")),
        budget={"max_latency_ms": 10.5, "size": 1e7},
        provenance={"tools": {"onnx": "1.23"}, "source_sha256": "0" * 64},
    )
    text = flat(invoke(path))
    for part in (
        "linear 1.0.0 for x86-64",
        f"key {load_signer().key_id} trusted as default",
        "Inputs x float32 [N, 4]",
        "Outputs y float32 [N, 2] total float32 []",
        "labels.txt (labels, 7 bytes) sha256 8b2a",
        "first tensorrt runs model.onnx; options: fp16 true",
        "fallback ort runs model.onnx; options: none",
        "Budget max_latency_ms 10.5 size 10.0 MB",
        "input x float32 [1, 4]",
        "output y float32 [1, 2], within 1e-05 + 1e-05 * |expected|",
        "tools.onnx 1.23",
        f"source_sha256 {'0' * 64}",
    ):
        assert part in text


def test_a_trusted_package_is_not_marked_unverified(path: Path) -> None:
    assert "UNVERIFIED" not in invoke(write_linear(path)).output


@pytest.mark.parametrize(
    ("figure", "shown"),
    [
        ({"size": {"value": 321_265, "label": "measured", "on": "host"}}, "size 321 kB (measured, host)"),
        ({"score": {"value": 0.764, "label": "measured", "on": "host"}}, "score 76.40 % (measured, host)"),
        ({"x": {"value": 2.5, "unit": "mJ", "label": "estimated"}}, "x 2.50 mJ (estimated)"),
        ({"x": {"value": 2.5, "samples": 100}}, "x 2.5 (samples 100)"),
        ({"size": True}, "size true"),
        ({"accuracy": 0.75}, "accuracy 0.75"),
        ({"peak_bytes": 57_938_640.0}, "peak_bytes 57,938,640"),
        ({"size": {"value": None, "label": "measured"}}, "size null (measured)"),
        ({"size": {"value": 10**400}}, "size 10,000,000"),
        ({"size": {"value": "big", "unit": 7}}, "size big"),
        ({"a": {"b": {"c": {"d": 1}}}}, 'a.b.c {"d": 1}'),
        ({"a": [1, "x", 0.123456789]}, "a [1, x, 0.123457]"),
        ({"memory": {"label": "estimated", "on": "rpi5", "peak": 5}}, "memory.peak 5 (estimated, rpi5)"),
        ({"a": {"label": "measured", "b": {"c": 1.5}}}, "a.b.c 1.5 (measured)"),
        ({"a": {}}, "a {}"),
        ({"a": {"label": "x"}}, 'a {"label": "x"}'),
    ],
)
def test_a_figure_is_shown_with_unit_and_label(figure: dict[str, Any], shown: str, path: Path) -> None:
    assert f"Figures {shown}" in flat(invoke(write_linear(path, figures=figure)))


def test_a_package_by_an_unknown_key_is_shown_but_first_called_unverified(
    path: Path, strange_signer: StatementSigner
) -> None:
    result = invoke(write_linear(path, sign=strange_signer))
    assert result.exit_code == 0
    assert result.stdout.startswith("UNVERIFIED: signed by a key that is not trusted")
    assert f"key {strange_signer.key_id} trusted NO" in flat(result)
    assert "edgekit keys trust" in result.stdout


def test_json_of_a_trusted_package_holds_the_manifest(path: Path) -> None:
    document = json.loads(invoke(write_linear(path), "--json").stdout)
    assert (document["verified"], document["key_name"]) == (True, "default")
    assert document["manifest"]["backend"] == {
        "name": "ort",
        "artifact": "model.onnx",
        "options": {"threads": 1},
        "fallback": None,
    }
    assert document["evidence"] is None


def test_json_of_a_package_by_an_unknown_key_says_so(path: Path, strange_signer: StatementSigner) -> None:
    document = json.loads(invoke(write_linear(path, sign=strange_signer), "--json").stdout)
    assert (document["verified"], document["key_name"]) == (False, None)
    assert document["key_id"] == strange_signer.key_id


def test_a_changed_artifact_of_an_unknown_key_is_refused(path: Path, strange_signer: StatementSigner) -> None:
    data = bytearray(write_linear(path, sign=strange_signer).read_bytes())
    data[data.index(b"no\nyes\n")] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"labels\.txt"):
        invoke(path)


def test_a_wrong_signature_that_claims_a_trusted_key_is_refused(
    path: Path, strange_signer: StatementSigner
) -> None:
    trusted_id = load_signer().key_id.encode()
    data = write_linear(path, sign=strange_signer).read_bytes()
    path.write_bytes(data.replace(strange_signer.key_id.encode(), trusted_id))
    with pytest.raises(SignatureError, match="does not fit its content"):
        invoke(path)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"not a package")
    with pytest.raises(PackageError):
        invoke(tmp_path / "x")
    with pytest.raises(PackageError, match="No such file"):
        invoke(tmp_path / "missing")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_evidence_beside_the_package_is_shown_as_verified(options: list[str], path: Path) -> None:
    write_linear(path)
    write_evidence(evidence_path(path), path, {"latency": {"value": 1.5, "label": "measured"}}, load_signer())
    result = invoke(path, *options)
    if options:
        evidence = json.loads(result.stdout)["evidence"]
        assert (evidence["verified"], evidence["predicate"]["latency"]["value"]) == (True, 1.5)
    else:
        assert "Evidence linear-1.0.0-x86-64.evidence.json (verified)" in flat(result)
        assert "latency 1.50 ms (measured)" in flat(result)


def test_evidence_by_an_unknown_key_is_shown_as_unverified(
    path: Path, strange_signer: StatementSigner
) -> None:
    write_linear(path)
    write_evidence(evidence_path(path), path, {"note": "fast"}, strange_signer)
    assert "(UNVERIFIED: by a key that is not trusted here)" in flat(invoke(path))
    assert "note fast" in flat(invoke(path))


def test_evidence_of_another_package_is_called_none(path: Path, tmp_path: Path) -> None:
    other = write_linear(tmp_path / "other", version="2")
    write_evidence(evidence_path(write_linear(path)), other, {"note": "fast"}, load_signer())
    result = invoke(path)
    assert "NO EVIDENCE:" in result.stdout
    assert "fast" not in result.stdout


def test_broken_evidence_does_not_hide_the_package(path: Path) -> None:
    evidence_path(write_linear(path)).write_bytes(b"{}")
    document = json.loads(invoke(path, "--json").stdout)
    assert document["verified"] is True
    assert "field 'payload' is missing" in document["evidence"]["problem"]


def test_hostile_names_are_neither_markup_nor_commands(path: Path) -> None:
    result = invoke(write_linear(path, provenance={HOSTILE: HOSTILE}))
    assert "[red]x[/red] :smile:" in result.stdout
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f\u202e]", result.stdout)
    assert not [line for line in result.stdout.splitlines() if line.startswith("UNVERIFIED")]


def test_golden_tensors_are_shown_as_they_are_stored(path: Path) -> None:
    golden = Golden(
        (GoldenInput("x", "float32", (1, 4), "golden/x.bin", Codes("uint8", 0.5, -1.0, (1, 2))),),
        (
            GoldenOutput(
                name="y", dtype="float32", shape=(1, 2), path="golden/y.bin", atol=1e-5, rtol=0.0, every=2
            ),
        ),
    )
    model = make_model(
        [helper.make_node("MatMul", ["x", "w"], ["y"])], [tensor("x", [1, 4])], [tensor("y", [1, 2])]
    )
    text = flat(
        invoke(write_model(path, model, np.zeros(2, np.uint8), np.zeros(1, np.float32), golden=golden))
    )
    assert "input x float32 [1, 4], uint8 codes * 0.5 + -1, each for [1, 2] values" in text
    assert "output y float32 [1, 2], within 1e-05 + 0 * |expected|, every 2. value" in text


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_window(
    width: int, path: Path, monkeypatch: pytest.MonkeyPatch, strange_signer: StatementSigner
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    name = "model/block_1/conv/very_long_tensor_name/" * 4
    write_linear(
        path,
        sign=strange_signer,
        provenance={"source": "x" * 300, name: 1},
        outputs=(TensorSpec(name, "float32", ("N",)), TensorSpec("y", "float32", ("N", 2))),
    )
    write_evidence(evidence_path(path), path, {"long": "word " * 50}, strange_signer)
    lines = invoke(path).stdout.splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("x") for line in lines) >= 300


def test_digests_and_key_ids_stay_whole_in_80_columns(path: Path) -> None:
    text = invoke(write_linear(path, provenance={"source_sha256": "0" * 64})).stdout
    assert load_signer().key_id in text
    assert f"source_sha256 {'0' * 64}" in text
    assert len(re.findall(r"sha256 [0-9a-f]{64}$", text, re.MULTILINE)) == 4 + 1


def test_rows_that_fit_share_columns_beside_longer_ones(path: Path) -> None:
    lines = invoke(write_linear(path, provenance={"a": "x", "long": "y" * 100, "medium": "z"})).stdout
    assert "\n  a       x\n  long\n    yyy" in lines
    assert "\n  medium  z\n" in lines


def test_a_console_without_unicode_shows_question_marks(path: Path) -> None:
    result = invoke(write_linear(path, provenance={"author": "Zoë"}), charset="ascii")
    assert "Zo?" in result.stdout


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_figures_that_are_nested_deeply_are_shown(options: list[str], path: Path) -> None:
    deep: Any = "bottom"
    for _ in range(300):
        deep = {"a": deep}
    write_linear(path, figures={"deep": deep})
    assert "bottom" in invoke(path, *options).stdout
