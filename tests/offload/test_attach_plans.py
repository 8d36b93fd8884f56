"""Packages with plans: what is added, and that a device and a server can run it."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from tests.service.service_parts import make_config, running
from tests.toolkit.cases import cases

from edgekit_offload.packaging.submodels import attach_plans
from edgekit_offload.partition.coding import Coding
from edgekit_offload.partition.split import SplitModels, split_model, whole_upload
from edgekit_runtime.client.client import Client
from edgekit_runtime.errors import BackendError, CutError
from edgekit_runtime.offload.cut_table import CutTable, read_cut_table
from edgekit_runtime.offload.offload_plan import OffloadPlan, PlanCosts
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions
from edgekit_runtime.service.serving.memory_estimate import model_bytes
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.selftest import read_golden, run_selftest
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer

MODEL = Path(__file__).parents[2] / "models" / "tiny" / "mnist5k_dscnn.onnx"
COSTS = PlanCosts(device_s=0.01, server_s=0.002, upload_bytes=1000.0, download_bytes=40.0)
TABLE = CutTable(
    (
        OffloadPlan("local", PlanCosts(device_s=0.02)),
        OffloadPlan("raw", COSTS, tail="raw.tail"),
        OffloadPlan("cut4-raw", COSTS, head="cut4-raw.head", tail="cut4-raw.tail"),
        OffloadPlan("cut8-int8", COSTS, head="cut8-int8.head", tail="cut8-int8.tail", compression="zstd"),
    )
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    generate_key("default", folder)
    return folder


@pytest.fixture(scope="module")
def plain(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain_package(
        MODEL,
        name="digits",
        target="x86-64",
        folder=tmp_path_factory.mktemp("plain"),
        sign=load_signer(folder=keys),
    )


@pytest.fixture(scope="module")
def splits() -> dict[str, SplitModels]:
    content = MODEL.read_bytes()
    return {
        "raw": whole_upload(content),
        "cut4-raw": split_model(content, range(4)),
        "cut8-int8": split_model(content, range(8), Coding("int8")),
    }


def open_package(path: Path, keys: Path) -> OpenedPackage:
    return read_package(path, TrustStore.from_folder(keys))


@pytest.fixture(scope="module")
def attached(
    keys: Path, plain: Path, splits: dict[str, SplitModels], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    with open_package(plain, keys) as package:
        return attach_plans(
            package, splits, TABLE, folder=tmp_path_factory.mktemp("plans"), sign=load_signer(folder=keys)
        )


def test_plans_keep_the_whole_model_and_its_fallback(attached: Path, plain: Path, keys: Path) -> None:
    with open_package(plain, keys) as before, open_package(attached, keys) as after:
        assert bytes(after.read("model.onnx")) == bytes(before.read("model.onnx"))
        assert after.manifest.backend.name == "offload"
        assert after.manifest.backend.fallback == before.manifest.backend
        assert after.manifest.golden == before.manifest.golden


def test_submodels_add_little(attached: Path, plain: Path) -> None:
    assert attached.stat().st_size - plain.stat().st_size < 70_000


def test_same_plans_give_the_same_bytes(
    attached: Path, keys: Path, plain: Path, splits: dict[str, SplitModels], tmp_path: Path
) -> None:
    with open_package(attached, keys) as package:
        again = attach_plans(package, splits, TABLE, folder=tmp_path, sign=load_signer(folder=keys))
    assert again.read_bytes() == attached.read_bytes()


def test_table_names_what_a_server_serves(attached: Path, keys: Path) -> None:
    with open_package(attached, keys) as package:
        table = read_cut_table(package)
        assert table is not None
        served = {
            package.manifest.select_submodel(one.name).name
            for one in package.manifest.submodels
            if one.name.endswith(".tail")
        }
    assert {plan.tail for plan in table.plans} == {None, *served}


@cases("name", ["raw.tail", "cut4-raw.head", "cut4-raw.tail", "cut8-int8.head", "cut8-int8.tail"])
def test_each_submodel_passes_its_own_test(attached: Path, keys: Path, name: str) -> None:
    with open_package(attached, keys) as package:
        selected = package.select_submodel(name)
        session = open_session(selected, threads=1)
        assert run_selftest(session, selected).passed
        session.close()


@pytest.mark.parametrize("name", ["raw.tail", "cut4-raw.head", "cut4-raw.tail", "cut8-int8.tail"])
def test_float_part_is_held_to_half_a_percent(attached: Path, keys: Path, name: str) -> None:
    with open_package(attached, keys) as package:
        selected = package.select_submodel(name)
        for output in selected.manifest.golden.outputs:
            values = output.decode(selected.read(output.path))
            # Half a percent, the rounding of expected values (1/32 of it), and that of the tolerance.
            assert output.atol <= 0.00501 * 32 / 31 * max(np.ptp(values), np.abs(values).max())


@pytest.mark.parametrize("cut", ["cut4-raw", "cut8-int8"])
def test_head_with_another_weight_fails_its_test(
    keys: Path, plain: Path, splits: dict[str, SplitModels], tmp_path: Path, cut: str
) -> None:
    plan = next(one for one in TABLE.plans if one.name == cut)
    with open_package(plain, keys) as package:
        path = attach_plans(
            package, {cut: splits[cut]}, CutTable((TABLE.plans[0], plan)), folder=tmp_path,
            sign=load_signer(folder=keys),
        )  # fmt: skip
    with open_package(path, keys) as package:
        selected = package.select_submodel(f"{cut}.head")
        case = read_golden(selected)
        whole = onnx.load_from_string(bytes(package.read("model.onnx")))
    weight = next(one for one in whole.graph.initializer if len(one.dims) == 4)
    values = numpy_helper.to_array(weight) * np.float32(1.1)
    content = MODEL.read_bytes()
    changed = content.replace(weight.raw_data, values.tobytes())
    assert changed != content
    split = split_model(changed, range(int(cut[3])), Coding("int8" if "int8" in cut else "raw"))
    assert split.head is not None
    session = OrtSession(split.head.content, OrtOptions(threads=1, weights="model.onnx"), changed)
    assert not case.check(session).passed


@pytest.mark.parametrize(("cut", "atol"), [("cut4-raw", 1e-5), ("cut8-int8", 0.2)])
def test_head_and_tail_out_of_a_package_give_the_whole_models_answer(
    attached: Path, keys: Path, cut: str, atol: float
) -> None:
    images = np.load(MODEL.with_name("mnist5k_dscnn.eval.npz"))["image"][:8]
    with open_package(attached, keys) as package:
        whole = open_session(package.select_submodel("raw.tail"), threads=1)
        head = open_session(package.select_submodel(f"{cut}.head"), threads=1)
        tail = open_session(package.select_submodel(f"{cut}.tail"), threads=1)
    expected = whole.run({"image": images})["logits"]
    got = tail.run(head.run({"image": images}))["logits"]
    # Sums in another order differ in the last bits; codes of 8 bits in half a step of each value.
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_table_that_names_no_submodel_is_refused(plain: Path, keys: Path, tmp_path: Path) -> None:
    with open_package(plain, keys) as package, pytest.raises(CutError, match=r"raw\.tail"):
        attach_plans(package, {}, TABLE, folder=tmp_path, sign=load_signer(folder=keys))


def test_weights_of_another_model_are_refused(splits: dict[str, SplitModels]) -> None:
    with pytest.raises(BackendError):
        OrtSession(splits["raw"].tail.content, OrtOptions(weights="model.onnx"), b"short")


def test_server_answers_all_tails_of_a_package_as_the_device_does(
    attached: Path, keys: Path, tmp_path: Path
) -> None:
    images = np.load(MODEL.with_name("mnist5k_dscnn.eval.npz"))["image"][:3]
    trust = TrustStore.from_folder(keys)
    config = make_config(tmp_path)
    with (
        open_package(attached, keys) as package,
        running(config, PackageFiles([], trust, [attached])) as service,
    ):
        served = {}
        for name in ("raw", "cut4-raw", "cut8-int8"):
            sent = {"image": images}
            if name != "raw":
                sent = dict(open_session(package.select_submodel(f"{name}.head"), threads=1).run(sent))
            tail = package.select_submodel(f"{name}.tail")
            with Client(str(service.socket_path)) as client:
                served[name] = client.infer(tail.manifest.name, sent)["logits"]
            np.testing.assert_array_equal(served[name], open_session(tail, threads=1).run(sent)["logits"])
    np.testing.assert_allclose(served["cut4-raw"], served["raw"], rtol=0, atol=1e-5)


def test_estimate_of_memory_counts_the_weights_that_a_tail_reads(attached: Path, keys: Path) -> None:
    with open_package(attached, keys) as package:
        one = {tail.name: tail for tail in package.manifest.submodels}
        views = {name: package.manifest.select_submodel(name) for name in one}
        whole_bytes = len(package.read("model.onnx"))
        graphs = {name: len(package.read(tail.backend.artifact)) for name, tail in one.items()}
    estimates = {name: model_bytes(view, attached, ModelOptions(), 1) for name, view in views.items()}
    parts = one["cut4-raw.head"], one["cut4-raw.tail"]
    assert (
        0.9 * whole_bytes
        < sum(part.weights_bytes for part in parts) + sum(graphs[part.name] for part in parts)
        < 1.2 * whole_bytes
    )
    assert not any(part.divides_integers for part in one.values())
    for name, tail in one.items():
        assert estimates[name] == 3 * (graphs[name] + tail.weights_bytes), name
    assert estimates["cut8-int8.tail"] < estimates["cut4-raw.tail"] < estimates["raw.tail"]
