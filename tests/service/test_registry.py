"""Loading, swapping and unloading models while clients use them."""

import asyncio
import dataclasses
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.service.service_parts import (
    X,
    ask,
    get_bytes,
    infer_bytes,
    make_config,
    post_bytes,
    running,
    write_identity,
)
from tests.service.wiring_parts import FailingVerifier, index, load, served_version

from edgekit_runtime import Client
from edgekit_runtime.errors import DigestError, EdgekitError, PackageError, RequestError
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.registry import Registry
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.version_policy import Servable, VersionPolicy, choose_order
from edgekit_runtime.service.options.model import ModelOptions, SwapOrder
from edgekit_runtime.service.serving import loader
from edgekit_runtime.service.serving.loader import Loaded
from edgekit_runtime.service.serving.served_version import Served
from edgekit_runtime.slots import HEALTHY, MAX_BEGUN, UNPROVEN, Slots
from edgekit_runtime.system.machine import available_bytes


def write(maker: PackageMaker, folder: Path, version: str, *, is_right: bool = True) -> Path:
    """Write version `version` of `linear`; one that is not right fails its self-test."""
    if not is_right:
        maker = dataclasses.replace(maker, artifacts={**maker.artifacts, "golden/y.bin": bytes(8)})
    path = folder / f"linear-{version}.edgepkg"
    maker.write(path, version=version)
    return path


def serve(maker: PackageMaker, folder: Path, **options: Any) -> Any:
    config = make_config(folder.parent, models={"linear": ModelOptions(**options)})
    return running(config, PackageFiles([folder], maker.trust))


def test_newest_version_is_served(maker: PackageMaker, packages: Path) -> None:
    for version in ("1.9.0", "1.10.0", "1.10.0-rc1"):
        write(maker, packages, version)
    with serve(maker, packages) as service:
        assert served_version(service) == "1.10.0"
        assert ask(service, infer_bytes(X, path="/v2/models/linear/versions/1.9.0/infer")).status == 404


def test_several_versions_are_served_side_by_side(maker: PackageMaker, packages: Path) -> None:
    for version in ("1.0.0", "2.0.0", "3.0.0"):
        write(maker, packages, version)
    with serve(maker, packages, specific=("1.0.0", "2.0.0")) as service:
        assert served_version(service) == "2.0.0"
        reply = ask(service, infer_bytes(X, path="/v2/models/linear/versions/1.0.0/infer"))
        assert reply.json["model_version"] == "1.0.0"
        assert ask(service, get_bytes("/v2/models/linear")).json["versions"] == ["2.0.0", "1.0.0"]
        assert ask(service, get_bytes("/v2/models/linear/versions/3.0.0/ready")).status == 404


def test_version_that_is_asked_for_and_not_installed_is_said(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages, specific=("1.0.0", "2.0.0")) as service:
        reply = ask(service, infer_bytes(X))
        assert (reply.status, "2.0.0" in reply.json["error"]) == (503, True)
        assert ask(service, get_bytes("/v2/health/ready")).status == 503
        assert ask(service, get_bytes("/v2/health/live")).status == 200


@pytest.mark.parametrize("order", ["availability", "resource"])
def test_new_version_takes_over_and_the_old_one_goes(
    maker: PackageMaker, packages: Path, order: SwapOrder
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages, swap=order) as service:
        write(maker, packages, "2.0.0")
        assert served_version(service) == "1.0.0"
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"
        assert ask(service, infer_bytes(X, path="/v2/models/linear/versions/1.0.0/infer")).status == 404


@pytest.mark.parametrize("order", ["availability", "resource"])
def test_version_that_fails_its_self_test_leaves_the_old_one_serving(
    maker: PackageMaker, packages: Path, order: SwapOrder
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages, swap=order) as service:
        path = write(maker, packages, "2.0.0", is_right=False)
        reply = load(service)
        assert (reply.status, "self-test" in reply.json["error"]) == (500, True)
        assert served_version(service) == "1.0.0"
        lines = index(service)
        assert [line[1:3] for line in lines] == [("1.0.0", "READY"), ("", "READY")]
        assert "the last load failed: " in lines[1][3] and "self-test" in lines[1][3]
        path.unlink()
        assert load(service).status == 200


def test_package_of_a_stranger_is_refused_and_the_old_one_serves(
    maker: PackageMaker, other_signer: Any, packages: Path
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        write(dataclasses.replace(maker, signer=other_signer), packages, "2.0.0")
        reply = load(service)
        assert (reply.status, "trusted" in reply.json["error"]) == (400, True)
        assert served_version(service) == "1.0.0"


def test_damaged_package_stops_neither_the_service_nor_other_models(
    maker: PackageMaker, packages: Path
) -> None:
    path = write(maker, packages, "1.0.0")
    write_identity(maker, packages / "echo.edgepkg", ["float32"])
    data = bytearray(path.read_bytes())
    data[-200] ^= 1
    with serve(maker, packages) as service:
        path.write_bytes(data)
        assert load(service).status == 400
        assert served_version(service) == "1.0.0"
        assert ask(service, get_bytes("/v2/models/echo/ready")).status == 200


def test_swaps_under_load_fail_no_request(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        stop, failures, counts = threading.Event(), [], []

        def use() -> None:
            count = 0
            with Client(service.socket_path) as client:
                while not stop.is_set():
                    try:
                        found = client.infer("linear", {"x": X})["y"]
                    except EdgekitError as error:
                        failures.append(str(error))
                        return
                    if not np.array_equal(found, X @ WEIGHT):
                        failures.append(str(found))
                    count += 1
            counts.append(count)

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for number in range(2, 22):
            write(maker, packages, f"{number}.0.0")
            assert load(service).status == 200
        stop.set()
        for thread in threads:
            thread.join()
        assert failures == []
        assert min(counts) > 0
        assert served_version(service) == "21.0.0"


def test_unloaded_model_is_not_ready_until_it_is_loaded_again(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service, Client(service.socket_path) as client:
        assert client.ready("linear")
        client.unload("linear")
        assert not client.ready("linear")
        with pytest.raises(RequestError) as caught:
            client.infer("linear", {"x": X})
        assert caught.value.status == 503
        assert client.index() == [
            {"name": "linear", "version": "", "state": "UNLOADED", "reason": "unloaded"}
        ]
        with pytest.raises(RequestError):
            client.unload("linear")
        client.load("linear")
        assert client.ready("linear")


@pytest.mark.parametrize("what", ["load", "unload"])
def test_unknown_model_is_said_and_not_remembered(maker: PackageMaker, packages: Path, what: str) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        assert ask(service, post_bytes(f"/v2/repository/models/other/{what}", b"")).status == 404
        assert [line[0] for line in index(service)] == ["linear"]


def test_load_with_a_config_or_files_is_refused(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        for parameters in (b'{"config": "{}"}', b'{"file:1/model.onnx": "AAAA"}', b"[]"):
            body = b'{"parameters": %s}' % parameters
            assert ask(service, post_bytes("/v2/repository/models/linear/load", body)).status == 400


def test_load_with_null_for_parameters_has_none(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        body = b'{"parameters": null}'
        assert ask(service, post_bytes("/v2/repository/models/linear/load", body)).status == 200
        reply = ask(service, post_bytes("/v2/repository/models/linear/load", b'{"parameters": 1}'))
        assert "expected an object" in reply.json["error"]


def test_statistics_count_what_was_done(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        for _ in range(3):
            ask(service, infer_bytes(X))
        (line,) = ask(service, get_bytes("/v2/models/linear/stats")).json["model_stats"]
        assert (line["inference_count"], line["execution_count"]) == (3, 3)
        assert line["inference_stats"]["success"]["count"] == 3
        assert line["last_inference"] > 1.6e12
        assert ask(service, get_bytes("/v2/models/stats")).json["model_stats"][0]["name"] == "linear"


def test_damaged_file_in_a_folder_stops_no_other_model(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    (packages / "damaged.edgepkg").write_text("nothing")
    with serve(maker, packages) as service:
        assert served_version(service) == "1.0.0"
        assert ask(service, post_bytes("/v2/repository/index", b"")).status == 200


def slots_of(maker: PackageMaker, folder: Path) -> Slots:
    return Slots(folder / "state", maker.trust)


def test_installed_version_is_served_and_confirmed_when_the_service_stops(
    maker: PackageMaker, packages: Path
) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        assert served_version(service) == "1.0.0"
        current = slots.load("linear").state.current
        assert current is not None
        assert (current.health, current.begun) == (UNPROVEN, 1)
    current = slots.load("linear").state.current
    assert current is not None
    assert current.health == HEALTHY


def test_version_that_is_loaded_often_by_one_process_is_not_rejected_for_it(
    maker: PackageMaker, packages: Path
) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        for _ in range(5):
            assert load(service).status == 200
        state = slots.load("linear").state
        assert state.current is not None
        assert (state.rejected, state.current.health, state.current.begun) == ((), UNPROVEN, 1)


def test_version_that_cannot_be_verified_now_is_loaded_later(maker: PackageMaker, packages: Path) -> None:
    trust = FailingVerifier(maker.trust)
    slots = Slots(packages.parent / "state", trust)
    slots.install(write(maker, packages, "1.0.0"))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        slots.install(write(maker, packages, "2.0.0"))
        before, trust.is_gone = slots.load("linear"), True
        assert load(service).status == 503
        assert served_version(service) == "1.0.0"
        assert slots.load("linear") == before
        trust.is_gone = False
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"


def begun(slots: Slots) -> dict[str, int]:
    return {item.version: item.begun for item in slots.load("linear").state.installed}


def test_version_in_its_last_start_on_trial_may_be_loaded_again(maker: PackageMaker, packages: Path) -> None:
    slots = slots_of(maker, packages.parent)
    for version in ("1.0.0", "2.0.0"):
        slots.install(write(maker, packages, version))
    for _ in range(MAX_BEGUN - 1):
        slots.begin_start("linear").package.close()
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        assert served_version(service) == "2.0.0"
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"
    assert [item.health for item in slots.load("linear").state.installed] == [HEALTHY, UNPROVEN]


def test_version_that_takes_the_place_of_one_that_fails_is_counted_once(
    maker: PackageMaker, packages: Path
) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    slots.install(write(maker, packages, "2.0.0", is_right=False))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        assert served_version(service) == "1.0.0"
        for _ in range(3):
            assert load(service).status == 200
        assert begun(slots)["1.0.0"] == 1


def test_version_in_use_is_not_counted_when_another_one_is_rejected(
    maker: PackageMaker, packages: Path
) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    source = InstalledModels(slots)
    with running(make_config(packages.parent), source) as service:
        for version in ("2.0.0", "3.0.0", "4.0.0"):
            slots.install(write(maker, packages, version))
            assert source.reject("linear", version, "its gates")
        assert begun(slots)["1.0.0"] == 1
        assert served_version(service) == "1.0.0"


def test_damaged_version_leaves_the_one_before_counted_once(maker: PackageMaker, packages: Path) -> None:
    slots = slots_of(maker, packages.parent)
    for version in ("1.0.0", "2.0.0"):
        slots.install(write(maker, packages, version))
    (path,) = slots.folder.glob("models/linear/slot-2.0.0-*")
    path.write_bytes(b"nothing")
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        for _ in range(5):
            assert load(service).status == 200
        assert served_version(service) == "1.0.0"
        assert begun(slots) == {"2.0.0": 0, "1.0.0": 1}


def test_installed_version_that_fails_gives_way_to_the_one_before(
    maker: PackageMaker, packages: Path
) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    with running(make_config(packages.parent), InstalledModels(slots)) as service:
        slots.install(write(maker, packages, "2.0.0", is_right=False))
        assert load(service).status == 200
        assert served_version(service) == "1.0.0"
    assert [rejection.version for rejection in slots.load("linear").state.rejected] == ["2.0.0"]


def test_installed_update_is_served_after_a_load(maker: PackageMaker, packages: Path) -> None:
    slots = slots_of(maker, packages.parent)
    slots.install(write(maker, packages, "1.0.0"))
    options = ModelOptions(swap="resource")
    with running(make_config(packages.parent, models={"linear": options}), InstalledModels(slots)) as service:
        slots.install(write(maker, packages, "2.0.0"))
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"


def test_service_without_models_is_live_and_ready(maker: PackageMaker, tmp_path: Path) -> None:
    with running(make_config(tmp_path), InstalledModels(slots_of(maker, tmp_path))) as service:
        assert ask(service, get_bytes("/v2/health/ready")).status == 200
        assert index(service) == []


def test_policy_chooses_the_newest_or_the_named() -> None:
    installed = [Servable("m", version, Path(version), "") for version in ("1.0", "1.2", "1.10", "2.0-rc1")]
    chosen = VersionPolicy(latest=2).choose("m", installed)
    assert [package.version for package in chosen] == ["2.0-rc1", "1.10"]
    chosen = VersionPolicy(specific=("1.0", "1.10")).choose("m", installed)
    assert [package.version for package in chosen] == ["1.10", "1.0"]


def test_swap_order_follows_the_free_memory_unless_it_is_set() -> None:
    assert choose_order(10, 10, "auto") == "availability"
    assert choose_order(11, 10, "auto") == "resource"
    assert choose_order(11, 10, "availability") == "availability"


def test_available_memory_is_that_of_the_tighter_limit(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:    100 kB\n")
    assert available_bytes(meminfo, tmp_path) == 102_400
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert available_bytes(meminfo, tmp_path) == 3000


def test_older_file_in_the_place_of_the_one_that_serves_is_refused(
    maker: PackageMaker, packages: Path
) -> None:
    newer = write(maker, packages, "1.1.0")
    with serve(maker, packages) as service:
        newer.unlink()
        write(maker, packages, "1.0.0")
        refused = load(service)
        assert (refused.status, "older than 1.1.0" in refused.json["error"]) == (400, True)
        assert served_version(service) == "1.1.0"
        write(maker, packages, "1.2.0")
        assert load(service).status == 200
        (packages / "linear-1.2.0.edgepkg").unlink()
    with serve(maker, packages) as again:  # files have no state
        assert served_version(again) == "1.0.0"


def test_older_file_takes_the_place_of_one_that_was_rejected(maker: PackageMaker, packages: Path) -> None:
    for version in ("1.0.0", "1.1.0"):
        write(maker, packages, version)
    with serve(maker, packages) as service:
        service.do(service.service.registry.give_up("linear", "1.1.0", "it crashes"))
        assert served_version(service) == "1.0.0"


def test_older_file_that_is_named_is_served(maker: PackageMaker, packages: Path) -> None:
    for version in ("1.0.0", "1.1.0"):
        write(maker, packages, version)
    source = PackageFiles([packages], maker.trust)
    for policy, version in ((VersionPolicy(), "1.1.0"), (VersionPolicy(specific=("1.0.0",)), "1.0.0")):
        (loaded,) = source.open("linear", policy, partial(loader.load, options=ModelOptions()))
        loaded.close()
        assert loaded.manifest.version == version


def test_damaged_file_is_passed_by_until_it_is_replaced(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    path = write(maker, packages, "1.1.0")
    whole = path.read_bytes()
    source = PackageFiles([packages], maker.trust)
    newest = VersionPolicy()

    def open_newest() -> str:
        (loaded,) = source.open("linear", newest, partial(loader.load, options=ModelOptions()))
        loaded.close()
        return loaded.manifest.version

    place = whole.index(maker.artifacts["model.onnx"])
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    assert [package.version for package in source.find("linear", newest)] == ["1.1.0"]  # not opened yet
    assert open_newest() == "1.0.0"
    assert [package.version for package in source.find("linear", newest)] == ["1.0.0"]
    path.unlink()
    write(maker, packages, "1.1.0")
    assert open_newest() == "1.1.0"


def test_file_that_is_replaced_between_listing_and_opening_is_not_served(
    maker: PackageMaker, packages: Path
) -> None:
    path = write(maker, packages, "1.0.0")
    source = PackageFiles([packages], maker.trust)
    (listed,) = source.find("linear", VersionPolicy())
    maker.write(path, version="0.9.0")
    with pytest.raises(PackageError, match="was replaced"):
        source.open_again(listed, partial(loader.load, options=ModelOptions()))


def test_start_with_damaged_files_alone_fails(maker: PackageMaker, packages: Path) -> None:
    path = write(maker, packages, "1.0.0")
    whole = path.read_bytes()
    place = whole.index(maker.artifacts["model.onnx"])
    path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])

    def never(_: Loaded) -> Served:
        raise AssertionError("nothing is loaded")

    registry = Registry(PackageFiles([packages], maker.trust), never, {})

    async def start() -> None:
        try:
            await registry.load_all()
        finally:
            await registry.close()

    with pytest.raises(DigestError, match=r"artifact 'model\.onnx' has sha256"):
        asyncio.run(start())
