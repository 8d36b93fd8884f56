"""`edgekit offload plan`, from the command line to the files."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from tests.offload.machine_here import MACHINE_HERE
from tests.offload.onnx_models import model_of

from edgekit_cli.cli import cli
from edgekit_cli.offload import source
from edgekit_cli.offload.plan_request import (
    parse_bandwidths,
    parse_bytes,
    parse_numbers,
    parse_percent,
    parse_watts,
)
from edgekit_cli.offload.source import read_named_model, read_samples, read_whole_model
from edgekit_offload.partition import opened_model
from edgekit_offload.planning.result import PlanningResult
from edgekit_offload.profiling.machine import Machine, RunnableGraph, profile_kernels
from edgekit_offload.profiling.model_profile import write_profile
from edgekit_runtime.dataclass_json import from_plain, to_plain
from edgekit_runtime.errors import CutError, EdgekitError, ModelError, OutputError
from edgekit_runtime.offload.cut_table import CutTable, read_cut_table
from edgekit_runtime.offload.measurement import job_runner
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

TINY = Path(__file__).parents[2] / "models" / "tiny"
MODEL, SAMPLES = TINY / "digits_cnn.onnx", TINY / "digits_cnn.calib.npz"


def invoke(*arguments: object) -> Result:
    texts = ["offload", "plan", *map(str, arguments)]
    return CliRunner().invoke(cli, texts, catch_exceptions=False, standalone_mode=False)


@pytest.fixture(scope="module")
def few_samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("samples") / "few.npz"
    with np.load(SAMPLES) as arrays:
        np.savez(path, **{name: values[:40] for name, values in arrays.items()})
    return path


@pytest.fixture(scope="module", autouse=True)
def _no_pauses() -> Iterator[None]:
    """Measure in this process without the pauses that let a processor become cold: no time decides a test."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (job_runner, opened_model):
            patch.setattr(module, "PAUSE_S", 0.0)
        yield


@pytest.fixture
def _machines_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Machines measure in this process; those of `planned` start programs."""
    monkeypatch.setattr(Machine, "parse", lambda _text: MACHINE_HERE)


@pytest.fixture(scope="module")
def planned(few_samples: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    folder = tmp_path_factory.mktemp("plan")
    machines = ("--device", "local", "--server", "local", "--seconds", "0.2")
    return invoke(MODEL, *machines, "--samples", few_samples, "-o", folder, "--rtt", "5,20"), folder


def test_plan_prints_every_way_and_where_it_is_best(planned: tuple[Result, Path]) -> None:
    text = planned[0].stdout
    assert planned[0].exception is None
    for words in ("local", "raw", "uint8", "cut", "What to make of it", "Written", "placements tried"):
        assert words in text
    assert re.search(r"uint8 .* measured", text)  # coded uploads are run as they are


def test_plan_of_a_model_says_why_it_writes_no_package(planned: tuple[Result, Path]) -> None:
    text = " ".join(planned[0].stdout.split())
    assert "No package was written" in text
    assert "edgekit package" in text


def test_folder_that_cannot_be_written_is_said_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "plans"):
        with pytest.raises(OutputError, match=re.escape(str(folder))):
            invoke(tmp_path / "no.onnx", "--device", "local", "--server", "local", "-o", folder)


def test_plan_writes_json_and_a_page(planned: tuple[Result, Path]) -> None:
    folder = planned[1]
    plain = json.loads((folder / "digits_cnn.plan.json").read_text())
    result = from_plain(PlanningResult, plain)
    assert result.rtts_ms == (5.0, 20.0)
    assert len(result.bandwidths_mbit_s) == 9
    assert result.table.local is not None
    attacked = [candidate for candidate in result.candidates if candidate.plan.leakage_db is not None]
    assert attacked
    assert all(candidate.known_inputs > 0 for candidate in attacked)
    assert f"from {attacked[0].known_inputs:,} known inputs" in " ".join(planned[0].stdout.split())
    assert "<html" in (folder / "digits_cnn.plan.html").read_text()


def test_profile_of_another_model_is_an_error(planned: tuple[Result, Path], tmp_path: Path) -> None:
    profile = profile_kernels(MACHINE_HERE, RunnableGraph(MODEL.read_bytes()), seconds=0.1)
    write_profile(tmp_path / "other.json", profile)
    other = TINY / "mnist5k_dscnn.onnx"
    machines = ("--device", tmp_path / "other.json", "--server", tmp_path / "other.json")
    with pytest.raises(CutError, match="expected"):
        invoke(other, *machines, "--samples", TINY / "mnist5k_dscnn.calib.npz", "-o", tmp_path)


def test_bandwidths_are_a_range_in_equal_ratios_or_values() -> None:
    found = parse_bandwidths("1..100")
    assert (found[0], found[-1], len(found)) == (1.0, 100.0, 9)
    np.testing.assert_allclose(np.diff(np.log(found)), np.log(100) / 8, rtol=0.01)  # rounded to 3 digits
    assert parse_bandwidths("10,2") == (2.0, 10.0)
    assert parse_numbers("20", "--rtt") == (20.0,)
    for wrong in ("0..10", "0", "10..1", "fast", "-1"):
        with pytest.raises(click.BadParameter):
            parse_bandwidths(wrong)


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ("127.0.0.1:8000", r"--server: machine '127.0.0.1:8000': .* http\(s\)://HOST:PORT"),
        ("http://", "address 'http://': expected"),
        ("local@0%", "0 % of a processor cannot be emulated; expected 10% to 95%"),
        ("local@200%", "200 % of a processor"),
        ("", "--server: machine ''"),
    ],
)
def test_server_that_is_none_is_said_before_anything_is_measured(
    tmp_path: Path, server: str, said: str
) -> None:
    with pytest.raises(EdgekitError, match=said):
        invoke(MODEL, "--device", "ssh:machine.invalid", "--server", server, "-o", tmp_path)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--server", "http://127.0.0.1:1"], "not a URL"),
        (["--server", "local", "--objective", "throughput"], "least latency"),
    ],
)
def test_three_tiers_refuse_what_they_would_get_wrong(tmp_path: Path, options: list[str], words: str) -> None:
    where = ["--device", "local", "--edge", "local", "--tiers", "3", "-o", str(tmp_path)]
    found = CliRunner().invoke(cli, ["offload", "plan", str(MODEL), *where, *options])
    assert found.exit_code == 2
    assert words in found.output


def test_sizes_and_watts_have_units_and_places() -> None:
    assert parse_bytes("64MB", "--memory") == 64e6
    assert parse_bytes("1.5 MiB", "--memory") == 1.5 * 2**20
    assert parse_watts("4,1") == (4.0, 1.0)
    with pytest.raises(click.BadParameter):
        parse_bytes("64", "--memory")
    with pytest.raises(click.BadParameter):
        parse_watts("4")


def test_largest_power_of_a_radio_is_one_that_a_device_reads() -> None:
    _, radio_w = parse_watts("4,999999")
    plan = OffloadPlan("local", PlanCosts(device_s=0.1, device_j=0.4))
    table = CutTable((plan,), radio_w=radio_w)
    assert from_plain(CutTable, to_plain(table)) == table


def test_latency_limit_over_an_hour_is_refused(tmp_path: Path) -> None:
    where = ["--device", "local", "--server", "local", "-o", str(tmp_path)]
    arguments = ["offload", "plan", str(MODEL), *where, "--latency-limit", "3600001"]
    refused = CliRunner().invoke(cli, arguments)
    assert refused.exit_code == 2
    assert "0<x<=3600000" in refused.output


def test_loss_is_a_percentage() -> None:
    assert parse_percent(" 0.1%", "--max-loss") == pytest.approx(1e-3)
    for text in ("0.1", "101%", "a%", "-1%"):
        with pytest.raises(click.BadParameter, match="expected"):
            parse_percent(text, "--max-loss")


@pytest.mark.usefixtures("_machines_here")
def test_package_that_was_planned_carries_the_cut_table(
    few_samples: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    generate_key("default")
    package = write_plain_package(
        MODEL, name="digits_cnn", target="x86-64", folder=tmp_path, sign=load_signer()
    )
    machines = ("--device", "local", "--server", "local", "--seconds", "0.1")
    invoke(package, *machines, "--samples", few_samples, "--bandwidth", "10", "-o", tmp_path / "plans")
    (planned,) = (tmp_path / "plans").glob("*.edgepkg")
    trust = TrustStore.from_folder(find_keys_folder())
    with read_package(planned, trust) as opened:
        table = read_cut_table(opened)
        assert table is not None
        assert table.local is not None
        heads = {one.head for one in table.plans if one.head is not None}
        assert heads <= {one.name for one in opened.manifest.submodels}


def write_sound(folder: Path) -> tuple[Path, Path]:
    """Write a model of half a second of sound, and samples."""
    weights = {"w": np.random.default_rng(0).normal(size=(4000, 3)).astype(np.float32)}
    content = model_of([("MatMul", ["x", "w"], ["y"])], {"x": ["N", 4000]}, ["y"], weights=weights)
    model, samples = folder / "sound.onnx", folder / "sound.npz"
    model.write_bytes(onnx.shape_inference.infer_shapes(onnx.load_from_string(content)).SerializeToString())
    waves = np.sin(np.outer(np.arange(1, 21) / 50, np.arange(4000)))
    np.savez(samples, x=(np.rint(9000 * waves) / 32768).astype(np.float32))
    return model, samples


@pytest.mark.usefixtures("_machines_here")
def test_opus_gets_the_sample_rate_that_the_package_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("soundfile", reason="soundfile is not installed")
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    model, samples = write_sound(tmp_path)
    stated = tmp_path / "rate.json"
    stated.write_text(json.dumps({"type": "audio", "sample_rate": 8000, "samples": 4000}))
    options = ("-t", "x86-64", "--backend", "ort", "--calibration", samples, "--search-seconds", 0)
    arguments = ["package", model, *options, "--preprocessing", stated, "-o", tmp_path / "packages"]
    CliRunner().invoke(cli, [str(one) for one in arguments], catch_exceptions=False, standalone_mode=False)
    (package,) = (tmp_path / "packages").glob("*.edgepkg")
    machines = ("--device", "local", "--server", "local", "--seconds", "0.1", "--samples", samples)
    invoke(package, *machines, "--bandwidth", "10", "-o", tmp_path / "plans")
    (path,) = (tmp_path / "plans").glob("*.plan.json")
    result = from_plain(PlanningResult, json.loads(path.read_text()))
    assert {codec for candidate in result.candidates for codec in candidate.plan.media.values()} == {
        "opus:24@8000"
    }
    (planned,) = (tmp_path / "plans").glob("*.edgepkg")
    with read_package(planned, TrustStore.from_folder(find_keys_folder())) as opened:
        assert read_cut_table(opened) == result.table


@pytest.mark.usefixtures("_machines_here")
def test_sample_rate_that_opus_has_not_is_named(tmp_path: Path) -> None:
    model, samples = write_sound(tmp_path)
    machines = ("--device", "local", "--server", "local", "--seconds", "0.1", "--samples", samples)
    printed = invoke(model, *machines, "--sample-rate", 44_100, "--bandwidth", "10", "-o", tmp_path / "plans")
    assert "Opus is not compared: 'x' has 44.1 kHz" in " ".join(printed.stdout.split())
    result = from_plain(PlanningResult, json.loads((tmp_path / "plans" / "sound.plan.json").read_text()))
    assert not any(candidate.plan.media for candidate in result.candidates)


@pytest.mark.usefixtures("_machines_here")
def test_samples_are_made_up_where_none_are_given_and_the_plan_says_so(tmp_path: Path) -> None:
    machines = ("--device", "local", "--server", "local", "--seconds", "0.1")
    invoke(MODEL, *machines, "--classes", "logits", "-o", tmp_path, "--bandwidth", "10")
    result = from_plain(PlanningResult, json.loads((tmp_path / "digits_cnn.plan.json").read_text()))
    assert any("generated inputs" in one and "--samples" in one for one in result.warnings)
    assert all(candidate.plan.leakage_db is None for candidate in result.candidates)
    lossy = [
        candidate
        for candidate in result.candidates
        if {one.coding for one in candidate.sent} - {"raw", "uint8"}
    ]
    assert lossy
    for candidate in result.candidates:
        assert candidate.is_over_loss == (candidate in lossy)
        assert candidate.plan.answers_changed is candidate.expected_loss is None
        assert any(candidate.name in one and "made-up" in one for one in result.warnings) == (
            candidate in lossy
        )


@pytest.mark.parametrize(
    ("options", "found"), [((), "there are none"), (("--samples", SAMPLES), r"there are \d{2,3}:")]
)
def test_limit_on_leakage_refuses_few_samples(
    tmp_path: Path, options: tuple[object, ...], found: str
) -> None:
    machines = ("--device", "ssh:machine.invalid", "--server", "ssh:machine.invalid")  # none is asked
    with pytest.raises(CutError, match=rf"at least 1,000 distinct samples, {found}.*learns too little"):
        invoke(MODEL, *machines, *options, "--max-leak", 20, "-o", tmp_path)


def test_tflite_model_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="--backend ort"):
        invoke(tmp_path / "model.tflite", "--device", "local", "--server", "local")


def test_samples_are_spread_over_all_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sorted samples: the first few would show one class alone."""
    data = np.repeat(np.arange(1000, dtype=np.float32)[:, None], 24, axis=1)
    model = TINY / "italy_power_mlp.onnx"
    content = model.read_bytes()
    given = onnx.load_from_string(content).graph.input[0]
    name, sizes = given.name, [one.dim_value for one in given.type.tensor_type.shape.dim]
    np.savez(tmp_path / "x.npz", **{name: data.reshape(1000, *sizes[1:])})  # type: ignore[arg-type]
    samples, _ = read_samples(model, content, tmp_path / "x.npz")
    again, _ = read_samples(model, content, tmp_path / "x.npz")
    seen = [float(one[name].flat[0]) for one in samples]
    assert len(set(seen)) == len(seen) == 400
    assert min(seen[:16]) < 250
    assert max(seen[:16]) > 750
    assert seen == [float(one[name].flat[0]) for one in again]
    attacked, _ = read_samples(model, content, tmp_path / "x.npz", 2000)
    assert len(attacked) == 1000
    for least in (400, 900):  # whatever they take
        assert len(read_samples(model, content, tmp_path / "x.npz", 2000, least, max_bytes=1.0)[0]) == least


def test_model_with_external_data_is_planned_as_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "outside.onnx"
    model = onnx.load(MODEL)
    onnx.save(model, path, save_as_external_data=True, location="outside.weights", size_threshold=0)
    assert path.stat().st_size < MODEL.stat().st_size / 2
    found = read_whole_model(path).graph
    assert not found.weights
    assert found.content == read_named_model(path).graph.content  # so a profile of it fits
    name = model.graph.input[0].name
    feeds = {name: np.load(SAMPLES)[name][:1].astype(np.float32)}
    sessions = (OrtSession(one, OrtOptions(threads=1)) for one in (found.content, MODEL.read_bytes()))
    one, other = (next(iter(session.run(feeds).values())) for session in sessions)
    np.testing.assert_array_equal(one, other)
    monkeypatch.setattr(source, "MAX_MODEL_BYTES", 1000)
    with pytest.raises(ModelError, match=r"no plan can carry it.*int8"):
        read_whole_model(path)
    assert read_named_model(path).graph.weights
