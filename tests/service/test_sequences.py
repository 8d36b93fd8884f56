"""Sequences: the service keeps the states of a model between requests."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.conftest import PackageMaker
from tests.service.sequence_parts import make_step, step, values, write_sums
from tests.service.service_parts import Replies, Running, ask, get_bytes, make_config, post_bytes, running
from tests.service.wiring_parts import load
from tests.waiting import wait_for

from edgekit_runtime import Client, SequenceStep
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import read_unverified_manifest
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.options.model import Isolation, ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.rollout import CanaryOptions, Gates, ShadowOptions
from edgekit_runtime.service.serving.memory_estimate import model_bytes
from edgekit_runtime.slots import Slots


@pytest.fixture(scope="module")
def service(maker: PackageMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("sequences")
    write_sums(maker, folder / "sums.edgepkg")
    maker.write(folder / "linear.edgepkg")
    paths = [folder / "sums.edgepkg", folder / "linear.edgepkg"]
    with running(make_config(folder), PackageFiles(paths, maker.trust)) as service:
        yield service


def serve_sums(maker: PackageMaker, folder: Path, **options: Any) -> Any:
    write_sums(maker, folder / "sums.edgepkg")
    config = make_config(folder, models={"sums": ModelOptions(**options)})
    return running(config, PackageFiles([folder / "sums.edgepkg"], maker.trust))


def figures(service: Running) -> Any:
    """Return the figures of the version in use."""
    entries = ask(service, get_bytes("/v2/models/stats")).json["model_stats"]
    return next(entry for entry in entries if entry["name"] == "sums")


def read_metrics(service: Running) -> str:
    return ask(service, get_bytes("/metrics")).body.decode()


def test_metadata_and_metrics_tell_of_states_and_sequences(service: Running) -> None:
    stated = ask(service, get_bytes("/v2/models/sums")).json
    assert stated["states"] == {"total_out": "total", "count_out": "count"}
    assert "sequence" in ask(service, get_bytes("/v2")).json["extensions"]
    before = figures(service)["sequences"]["active"]
    step(service, [[1, 2]], "counted", start=True)
    line = f'edgekit_active_sequences{{model="sums",version="1.0.0"}} {before + 1}'
    assert line in read_metrics(service)


def test_states_stay_between_the_requests_of_a_sequence(service: Running) -> None:
    assert values(step(service, [[1, 2]], 7, start=True)) == [1, 2]
    assert values(step(service, [[3, 4]], "other", start=True)) == [3, 4]
    assert values(step(service, [[10, 20]], 7)) == [11, 22]
    assert values(step(service, [[10, 20]], "other")) == [13, 24]
    assert values(step(service, [[100, 200]], 7, end=True)) == [111, 222]
    reply = step(service, [[1, 2]], 7)
    assert reply.status == 400
    assert "sequence 7 is not active" in reply.json["error"]


def test_a_request_without_a_sequence_begins_with_zeros(service: Running) -> None:
    assert values(step(service, [[1, 2]])) == [1, 2]
    assert values(step(service, [[1, 2]])) == [1, 2]


def test_states_that_are_sent_come_before_those_of_the_sequence(service: Running) -> None:
    total = {"name": "total", "datatype": "FP32", "shape": [1, 2], "data": [100, 200]}
    assert values(step(service, [[1, 2]], inputs=[total])) == [101, 202]
    assert values(step(service, [[1, 2]], 8, start=True, inputs=[total])) == [101, 202]
    assert values(step(service, [[1, 2]], 8)) == [102, 204]


def test_states_are_returned_only_where_they_are_asked_for(service: Running) -> None:
    reply = step(service, [[1, 2]], 9, start=True)
    assert [output["name"] for output in reply.json["outputs"]] == ["y"]
    reply = step(service, [[1, 2]], 9, outputs=[{"name": "count_out"}])
    assert values(reply, "count_out") == [2]


def test_a_sequence_is_the_same_on_another_connection(service: Running) -> None:
    with service.connect() as first, service.connect_tcp() as second:
        for client, start, total in ((first, True, 1), (second, False, 2), (first, False, 3)):
            client.sendall(make_step([[1, 1]], "wide", start=start))
            assert values(Replies(client).next()) == [total, total]


def test_the_client_sends_steps(service: Running) -> None:
    x: Any = np.array([[1, 2]], np.float32)
    with Client(service.socket_path) as client:
        for index in range(3):
            outputs = client.infer("sums", {"x": x}, sequence=SequenceStep("mine", start=index == 0))
            assert outputs.keys() == {"y"}
            assert outputs["y"].tolist() == [[index + 1.0, 2 * index + 2.0]]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sequence_id": 1.5}, "whole number"),
        ({"sequence_id": True}, "whole number"),
        ({"sequence_id": -1}, "whole number"),
        ({"sequence_id": 1 << 64}, "whole number"),
        ({"sequence_id": "a" * 129}, "128 characters"),
        ({"sequence_id": [1]}, "whole number"),
        ({"sequence_start": True}, "need a sequence_id"),
        ({"sequence_id": 0, "sequence_end": True}, "need a sequence_id"),
        ({"sequence_id": 3, "sequence_start": 1}, "sequence_start"),
    ],
)
def test_wrong_parameters_are_refused(service: Running, parameters: Any, message: str) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}
    reply = ask(
        service, post_bytes("/v2/models/sums/infer", _dump({"inputs": [entry], "parameters": parameters}))
    )
    assert reply.status == 400
    assert message in reply.json["error"]


def test_the_largest_ids_are_accepted(service: Running) -> None:
    for sequence_id in ((1 << 64) - 1, "ä" * 128):
        assert values(step(service, [[1, 2]], sequence_id, start=True, end=True)) == [1, 2]


def test_a_model_without_states_refuses_a_sequence(service: Running) -> None:
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "data": [1, 2, 3, 4]}
    body = _dump({"inputs": [entry], "parameters": {"sequence_id": 5, "sequence_start": True}})
    reply = ask(service, post_bytes("/v2/models/linear/infer", body))
    assert (reply.status, "keeps no state" in reply.json["error"]) == (400, True)


def test_sequences_in_one_batch_are_answered_as_one_by_one(maker: PackageMaker, tmp_path: Path) -> None:
    limits = SchedulingLimits(max_batch=16, max_delay_s=0.02, short_s=0.0)
    count, steps = 24, 5
    random = np.random.default_rng(0)
    data = random.integers(-50, 50, (count, steps, 1, 2))
    answers: dict[int, list[list[float]]] = {}
    with serve_sums(maker, tmp_path, scheduling=limits) as service:

        def ask_all(number: int) -> None:
            with service.connect() as client:
                replies = Replies(client)
                for index, rows in enumerate(data[number]):
                    client.sendall(make_step(rows, number + 1, start=index == 0, end=index == steps - 1))
                    answers.setdefault(number, []).append(values(replies.next()))

        clients = [threading.Thread(target=ask_all, args=(number,)) for number in range(count)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(60)
        batches = [entry["batch_size"] for entry in figures(service)["batch_stats"]]
        assert figures(service)["sequences"]["active"] == 0
    assert max(batches) > 1
    expected = np.cumsum(data, axis=1)[:, :, 0].astype(float)
    assert [answers[number] for number in range(count)] == expected.tolist()


def test_a_swap_ends_the_sequences_of_the_version_before(maker: PackageMaker, tmp_path: Path) -> None:
    with serve_sums(maker, tmp_path) as service:
        step(service, [[1, 2]], 7, start=True)
        write_sums(maker, tmp_path / "sums.edgepkg", version="2.0.0", factor=2.0)
        assert load(service, "sums").status == 200
        reply = step(service, [[1, 2]], 7)
        assert reply.status == 400
        assert "sums 2.0.0: sequence 7 is not active" in reply.json["error"]
        assert values(step(service, [[1, 2]], 7, start=True)) == [2, 4]


def serve_two(maker: PackageMaker, folder: Path, options: ModelOptions) -> Any:
    """Serve 1.0.0 of `sums`, with 2.0.0, which doubles its inputs, on trial."""
    slots = Slots(folder / "state", maker.trust)
    for version, factor in (("1.0.0", 1.0), ("2.0.0", 2.0)):
        write_sums(maker, folder / "sums.edgepkg", version=version, factor=factor)
        slots.install(folder / "sums.edgepkg")
        if version == "1.0.0":
            slots.begin_start("sums").package.close()
            slots.confirm("sums", version)
    config = make_config(folder, models={"sums": options})
    return running(config, InstalledModels(slots))


@pytest.mark.parametrize("isolated", [False, True])
def test_in_a_canary_a_sequence_stays_with_its_version(
    maker: PackageMaker, tmp_path: Path, isolated: bool
) -> None:
    options = ModelOptions(
        rollout="canary",
        isolated=isolated,
        canary=CanaryOptions(share=0.5),
        gates=Gates(min_samples=10**9, min_agreement=0.0),
    )
    with serve_two(maker, tmp_path, options) as service:
        for number in range(1, 41):
            step(service, [[1, 1]], number, start=True)
        for _ in range(2):
            for number in range(1, 41):
                step(service, [[1, 1]], number)
        totals = [values(step(service, [[1, 1]], number, end=True))[0] for number in range(1, 41)]
        rollout = _wait_pairs(service)
    assert set(totals) == {4.0, 8.0}  # all steps by one version
    assert 5 <= totals.count(8.0) <= 25
    assert rollout["candidate"]["failed"] == 0


def test_a_shadow_is_compared_as_at_the_start_of_a_sequence(maker: PackageMaker, tmp_path: Path) -> None:
    options = ModelOptions(
        rollout="shadow",
        shadow=ShadowOptions(share=1.0, quiet_s=0.001, comparison="similarity"),
        gates=Gates(min_samples=10**9, min_agreement=0.0),
    )
    with serve_two(maker, tmp_path, options) as service:
        for index in range(3):
            assert values(step(service, [[1, 1]], 7, start=index == 0)) == [index + 1.0] * 2
        rollout = _wait_pairs(service)
    assert rollout["agreement"] == 0.0  # 2 instead of 1, whatever the sequence had come to
    assert rollout["candidate"]["failed"] == 0


def test_versions_with_other_states_are_not_tried(maker: PackageMaker, tmp_path: Path) -> None:
    slots = Slots(tmp_path / "state", maker.trust)
    for version, is_sequence in (("1.0.0", True), ("2.0.0", False)):
        write_sums(maker, tmp_path / "sums.edgepkg", version=version, has_states=is_sequence)
        slots.install(tmp_path / "sums.edgepkg")
        if is_sequence:
            slots.begin_start("sums").package.close()
            slots.confirm("sums", version)
    config = make_config(tmp_path, models={"sums": ModelOptions(rollout="canary")})
    with running(config, InstalledModels(slots)) as service:
        reply = load(service, "sums")
    assert "states [] instead of ['total_out as total'" in reply.json["error"]


def test_an_isolated_model_keeps_states_in_its_worker(maker: PackageMaker, tmp_path: Path) -> None:
    with serve_sums(maker, tmp_path, isolated=True) as service:
        for index in range(3):
            assert values(step(service, [[1, 1]], 7, start=index == 0)) == [index + 1.0] * 2
        wait_for(lambda: figures(service).get("sequences", {}).get("active") == 1, "a report of the worker")
        assert 'edgekit_active_sequences{model="sums",version="1.0.0"} 1' in read_metrics(service)


def test_several_workers_are_refused_for_a_model_with_states(maker: PackageMaker, tmp_path: Path) -> None:
    options = {"isolated": True, "isolation": Isolation(processes=2)}
    with (
        pytest.raises(BackendError, match=r"isolation.processes = 1"),
        serve_sums(maker, tmp_path, **options) as service,
    ):
        service.do(service.service.registry.load("sums"))


def test_the_memory_of_all_sequences_counts_under_the_cap(maker: PackageMaker, tmp_path: Path) -> None:
    path = tmp_path / "sums.edgepkg"
    write_sums(maker, path)
    options = ModelOptions(max_sequences=100)
    manifest = read_unverified_manifest(path, check_artifacts=False).manifest
    without = dataclasses.replace(manifest, states=())
    difference = model_bytes(manifest, path, options, 1) - model_bytes(without, path, options, 1)
    assert difference == 100 * (2048 + 8 + 8)


def _wait_pairs(service: Running) -> Any:
    def find() -> Any:
        rollout = figures(service).get("rollout")
        return rollout if rollout and rollout["agreement"] is not None else None

    wait_for(lambda: find() is not None, "a pair of runs")
    return find()


def _dump(document: Any) -> bytes:
    return json.dumps(document).encode()
