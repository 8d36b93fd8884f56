"""Cache, drift, memory cap and metrics in a running service."""

import dataclasses
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.fork_server import runtime_server
from tests.runtime.conftest import WEIGHT, PackageMaker
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import environment
from tests.service.service_parts import X, ask, get_bytes, make_config, post_bytes, running
from tests.service.wiring_parts import (
    ask_many,
    changed,
    index,
    infer,
    load,
    metrics,
    read_json,
    served_version,
    statistics,
    with_variant,
    write,
)
from tests.waiting import bounded, wait_for

from edgekit_runtime import Client
from edgekit_runtime.autotune.contest import RunSetting
from edgekit_runtime.autotune.tune import Tuning
from edgekit_runtime.cli import main
from edgekit_runtime.errors import ConfigError, EdgekitError, PackageError, SlotError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.models.memory_cap import estimate_bytes
from edgekit_runtime.service.models.slot_source import InstalledModels
from edgekit_runtime.service.models.version_policy import Servable
from edgekit_runtime.service.options.config import read_config
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.resources import ModelMemory
from edgekit_runtime.sessions.local_results import Tuned, keep_tuned, keep_winner
from edgekit_runtime.slots import Slots
from edgekit_toolkit.packaging.signing_keys import StatementSigner


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))


def serve(maker: PackageMaker, packages: Path, **sections: Any) -> Any:
    return running(make_config(packages.parent, **sections), PackageFiles([packages], maker.trust))


def test_equal_inputs_are_answered_from_the_cache_until_the_version_changes(
    maker: PackageMaker, packages: Path
) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages, models={"linear": ModelOptions(cache=True)}) as service:
        for y in ask_many(service, 5):
            np.testing.assert_array_equal(y, X @ WEIGHT)
        found = statistics(service)
        assert (found["cache"]["hits"], found["cache"]["misses"]) == (4, 1)
        # As in Triton: successes and the queue hold hits, the engine's figures do not.
        counts = {name: stated["count"] for name, stated in found["inference_stats"].items()}
        assert counts == {
            "success": 5,
            "queue": 5,
            "fail": 0,
            "cache_hit": 4,
            "cache_miss": 1,
            "cancel": 0,
            "compute_input": 1,
            "compute_infer": 1,
            "compute_output": 1,
        }
        assert (found["inference_count"], found["execution_count"]) == (1, 1)
        lane = 'model="linear",version="1.0.0"'
        assert f'edgekit_requests_total{{{lane},outcome="succeeded"}} 5' in metrics(service)
        assert f"edgekit_request_seconds_count{{{lane}}} 5" in metrics(service)
        assert f"edgekit_compute_seconds_count{{{lane}}} 1" in metrics(service)
        assert 'edgekit_cache_hits_total{model="linear",version="1.0.0"} 4' in metrics(service)
        write(changed(maker, 2.0), packages, "2.0.0")
        assert load(service).status == 200
        (y,) = ask_many(service, 1)
        np.testing.assert_array_equal(y, 2 * X @ WEIGHT)


def test_cache_is_off_by_default(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        list(ask_many(service, 3))
        assert "cache" not in statistics(service)
        assert statistics(service)["inference_stats"]["cache_hit"]["count"] == 0


def test_statistics_say_how_far_inputs_drift_from_the_reference(maker: PackageMaker, packages: Path) -> None:
    reference = {
        "samples": 8,
        "inputs": {
            "x": {
                "low": -1.0,
                "high": 1.0,
                "mean": 0.0,
                "std": 0.5,
                "edges": [-0.5, 0.0, 0.5],
                "shares": [0.25, 0.25, 0.25, 0.25],
            }
        },
        "outputs": {},
    }
    write(maker, packages, "1.0.0", figures={"size_bytes": 100, "reference": reference})
    with serve(maker, packages) as service:
        list(ask_many(service, 50))
        drift = statistics(service)["drift"]
        assert drift["looked_at"] >= 1
        assert drift["inputs"]["x"]["outside"] > 0.5


def test_malformed_reference_costs_the_drift_statistics_only(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0", figures={"reference": {"inputs": 3}})
    with serve(maker, packages) as service:
        assert infer(service).status == 200
        assert "drift" not in statistics(service)


def cap_for(packages: Path, models: int) -> ModelMemory:
    """Return a cap that holds so many of the models in `packages`."""
    path = next(packages.glob("*.edgepkg"))
    return ModelMemory(max_bytes=int((models + 0.5) * estimate_bytes([Servable("m", "1", path, "")])))


def write_models(maker: PackageMaker, packages: Path, count: int) -> list[str]:
    names = [f"m{number}" for number in range(count)]
    for name in names:
        write(maker, packages, "1.0.0", name=name)
    return names


def ready(service: Any) -> list[str]:
    return [name for name, _, state, _ in index(service) if state == "READY"]


def test_least_recently_used_model_goes_and_comes_back_with_its_next_request(
    maker: PackageMaker, packages: Path
) -> None:
    write_models(maker, packages, 3)
    with serve(maker, packages, memory=cap_for(packages, 2)) as service:
        assert ready(service) == ["m0", "m1"]
        assert ask(service, get_bytes("/v2/health/ready")).status == 200
        assert ask(service, get_bytes("/v2/models/m2/ready")).status == 200
        assert infer(service, name="m1").status == 200
        assert infer(service, name="m0").status == 200
        assert infer(service, name="m2").status == 200
        assert ready(service) == ["m0", "m2"]
        assert "next request" in {line[0]: line[3] for line in index(service)}["m1"]
        assert infer(service, name="m1").status == 200
        assert ready(service) == ["m1", "m2"]
        assert ask(service, get_bytes("/v2/models/m0")).json["name"] == "m0"
        assert 'edgekit_swaps_total{model="m1",outcome="evicted"} 1' in metrics(service)


def test_model_that_is_to_stay_is_not_unloaded_for_others(maker: PackageMaker, packages: Path) -> None:
    write_models(maker, packages, 3)
    kept = {"m0": ModelOptions(keep_loaded=True)}
    with serve(maker, packages, memory=cap_for(packages, 2), models=kept) as service:
        for name in ("m1", "m2", "m1", "m2"):
            assert infer(service, name=name).status == 200
            assert "m0" in ready(service)


def test_model_that_can_never_fit_is_said(maker: PackageMaker, packages: Path) -> None:
    write_models(maker, packages, 1)
    with serve(maker, packages, memory=ModelMemory(max_bytes=10)) as service:
        reply = infer(service, name="m0")
        assert (reply.status, "cap" in reply.json["error"]) == (503, True)
        assert ask(service, get_bytes("/v2/health/ready")).status == 503


def test_swap_under_a_cap_that_holds_one_model_unloads_first(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages, memory=cap_for(packages, 1)) as service:
        write(changed(maker, 2.0), packages, "2.0.0")
        assert load(service).status == 200
        assert served_version(service) == "2.0.0"


def test_many_clients_over_more_models_than_fit_get_right_answers(
    maker: PackageMaker, packages: Path
) -> None:
    names = write_models(maker, packages, 5)
    failures: list[str] = []
    with serve(maker, packages, memory=cap_for(packages, 2)) as service:
        models = service.service.registry.models.by_name
        # Until its turn comes at the start, a model answers 503.
        wait_for(
            lambda: service.call(
                lambda: len(models) == 5 and all(one.state != "LOADING" for one in models.values())
            ),
            "the end of the start",
        )

        def use(seed: int) -> None:
            rng = np.random.default_rng(seed)
            with Client(service.socket_path) as client:
                for _ in range(15):
                    try:
                        y = client.infer(names[rng.integers(len(names))], {"x": X})["y"]
                    except EdgekitError as error:  # noqa: PERF203  # each request is a try of its own
                        failures.append(str(error))
                    else:
                        if not np.array_equal(y, X @ WEIGHT):
                            failures.append(str(y))

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(use, range(6)))
        assert failures == []
        assert len(ready(service)) == 2


def test_unloading_a_model_that_waits_for_its_next_request_keeps_it_away(
    maker: PackageMaker, packages: Path
) -> None:
    write_models(maker, packages, 2)
    with serve(maker, packages, memory=cap_for(packages, 1)) as service:
        assert ask(service, post_bytes("/v2/repository/models/m1/unload", b"")).status == 200
        assert infer(service, name="m1").status == 503


def test_metrics_name_everything_that_runs_here(maker: PackageMaker, packages: Path) -> None:
    write(maker, packages, "1.0.0")
    with serve(maker, packages) as service:
        list(ask_many(service, 3))
        write(maker, packages, "2.0.0")
        load(service)
        list(ask_many(service, 2))
        text = metrics(service)
        labels = 'model="linear",version="2.0.0"'
        assert f'edgekit_requests_total{{{labels},outcome="succeeded"}} 2' in text
        for line in (
            f"edgekit_request_seconds_count{{{labels}}} 2",
            f"edgekit_queue_seconds_count{{{labels}}} 2",
            f"edgekit_queue_length{{{labels}}} 0",
            f"edgekit_batch_calls_count{{{labels}}} 2",
            'edgekit_swaps_total{model="linear",outcome="swapped"} 1',
            'edgekit_memory_bytes{kind="pss"}',
            "edgekit_connections ",
        ):
            assert line in text
        assert "edgekit_request_energy" not in text
        assert "edgekit_rollout" not in text


def test_winner_of_the_tournament_is_the_variant_that_is_served(maker: PackageMaker, packages: Path) -> None:
    double, variant = with_variant(maker, "double", 2.0)
    path = write(double, packages, "1.0.0", variants=(variant,))
    with serve(maker, packages) as service:
        np.testing.assert_array_equal(next(ask_many(service, 1)), X @ WEIGHT)
        with read_package(path, maker.trust) as package:
            keep_winner(package.manifest, "double", 0)
        assert load(service).status == 200
        np.testing.assert_array_equal(next(ask_many(service, 1)), 2 * X @ WEIGHT)
        assert statistics(service)["variant"] == "double"


def test_variant_that_fails_its_own_self_test_is_not_served(maker: PackageMaker, packages: Path) -> None:
    wrong, variant = with_variant(maker, "double", 2.0)
    wrong.artifacts["variants/double/output0.bin"] = bytes(8)
    path = write(wrong, packages, "1.0.0", variants=(variant,))
    with read_package(path, maker.trust) as package:
        keep_winner(package.manifest, "double", 0)
    with serve(maker, packages) as service:
        reply = infer(service)
        assert (reply.status, "variant 'double': failed its self-test" in reply.json["error"]) == (503, True)


def test_what_tuning_found_is_what_the_service_runs_with(maker: PackageMaker, packages: Path) -> None:
    path = write(maker, packages, "1.0.0")
    with read_package(path, maker.trust) as package:
        manifest = package.manifest
        keep_tuned(manifest, manifest.backend, Tuned("throughput", {"arena": False}, instances=3, batch=4))
    with serve(maker, packages) as service:
        loaded = service.call(lambda: service.service.registry.models.find("linear", None).loaded)
        assert (len(loaded.instances), loaded.scheduling.max_batch) == (3, 4)
        np.testing.assert_array_equal(next(ask_many(service, 1)), X @ WEIGHT)
    stated = ModelOptions(instances=2, scheduling=SchedulingLimits(max_batch=2))
    with serve(maker, packages, models={"linear": stated}) as service:
        loaded = service.call(lambda: service.service.registry.models.find("linear", None).loaded)
        assert (len(loaded.instances), loaded.scheduling.max_batch) == (2, 2)


CONFIG = """
[listen]
port = 0
[cache]
max_bytes = 1000000
[drift]
budget_s = 1e-6
[memory]
max_bytes = 500_000_000
load_wait_s = 2
[power]
sysfs = "/host/sys"
period_s = 0.5
power_w = 5
[log]
json = true
[models.kws]
rollout = "canary"
cache = true
keep_loaded = true
canary = {share = 0.05, retry = false}
gates = {min_agreement = 0.95, max_p99_ratio = 0, max_duration_s = 600}
scheduling = {max_batch = 8, max_delay_s = 0.002, max_waiting = 16, levels = 4, default_level = 3}
governor = {deadline_ms = 50, variants = ["default", "int8"], threads = [1, 2], batches = [1, 4]}
[models.vww]
rollout = "shadow"
shadow = {share = 0.2, comparison = "similarity"}
drift = false
"""


def test_configuration_file_states_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "service.toml"
    path.write_text(CONFIG)
    config = read_config(path)
    kws, vww = config.models["kws"], config.models["vww"]
    assert (config.cache.max_bytes, config.memory.load_wait_s, config.power.sysfs) == (
        1000000,
        2,
        "/host/sys",
    )
    assert config.log.json
    assert (kws.rollout, kws.canary.share, kws.canary.retry) == ("canary", 0.05, False)
    assert (kws.gates.min_agreement, kws.gates.max_p99_ratio) == (0.95, 0)
    assert (kws.scheduling.max_batch, kws.scheduling.levels) == (8, 4)
    assert kws.governor is not None
    assert (kws.governor.variants, kws.governor.threads) == (("default", "int8"), (1, 2))
    assert (config.power.power_w, config.power.window_s) == (5, 30.0)
    assert (vww.shadow.share, vww.shadow.comparison, vww.drift) == (0.2, "similarity", False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[models.m]\nrollout = 'blue'", "expected one of swap, canary, shadow"),
        ("[models.m]\nrollout = 'canary'\nlatest = 2", "latest and specific must not"),
        ("[models.m.canary]\nshare = 2.0", "share is 2.0, expected 1e-06 to 1"),
        ("[models.m.gates]\nalpha = 0.9", "alpha"),
        ("[models.m.gates]\nalpha = 0", "alpha"),
        ("[models.m.governor]\npower_w = 3", "unknown setting 'power_w'"),
        ("[models.m.governor]\nbatches = ['a']", "a list of whole numbers"),
        ("[models.m.governor]\nbatches = []", "batches is empty"),
        ("[models.m.governor]\ndeadline_ms = 0", "deadline_ms is 0"),
        ("[power]\npower_w = 3", "no model has a governor"),
        ("[power]\npower_w = 0\n[models.m.governor]", "power_w > 0"),
        ("[power]\nbattery_floor = 1\n[models.m.governor]", "floor of 0 to less than 1"),
        ("[power]\nidle_w = -1", "idle_w is -1, expected 0 to"),
        ("[memory]\nmax_bytes = 0", "max_bytes is 0, expected 1 to"),
        ("[power]\nperiod_s = 0.001", "period_s"),
        ("[drift]\nwindow = 0", "window"),
        (
            "[models.m]\nisolated = true\n[models.m.isolation]\nprocesses = 0",
            "processes is 0, expected 1 to 64",
        ),
        (
            "[models.m]\nisolated = true\nrollout = 'canary'\n[models.m.isolation]\nprocesses = 2",
            "got isolation.processes = 2; set that to 1",
        ),
        (
            "[models.m]\nisolated = true\n[models.m.governor]\n[models.m.isolation]\nprocesses = 2",
            "got isolation.processes = 2; set that to 1",
        ),
        ("[surprise]\n", "unknown tables ['surprise']"),
    ],
)
def test_configuration_that_makes_no_sense_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "service.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(said)) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_process_with_a_configuration_file_serves_with_cache_and_json_log(
    maker: PackageMaker, other_signer: StatementSigner, packages: Path, tmp_path: Path
) -> None:
    write(maker, packages, "1.0.0")
    keys = write_keys(tmp_path / "keys")
    socket_path = tmp_path / "s.sock"
    config = tmp_path / "service.toml"
    config.write_text(
        f'[listen]\nunix_socket = "{socket_path}"\nhost = ""\n[log]\njson = true\n[power]\nsensors = false\n'
        "[models.linear]\ncache = true\n[models.linear.scheduling]\nmax_batch = 4\n"
    )
    command = [sys.executable, "-m", "edgekit_runtime.cli", "serve", "--package", str(packages)]
    process = runtime_server().popen(
        [*command, "--keys", str(keys), "--config", str(config)],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(tmp_path),
        cwd=tmp_path,
    )
    with bounded(process):
        assert process.stderr is not None
        assert "ready" in process.stderr.readline()
        with Client(str(socket_path)) as client:
            for _ in range(3):
                np.testing.assert_array_equal(client.infer("linear", {"x": X})["y"], X @ WEIGHT)
            write(dataclasses.replace(maker, signer=other_signer), packages, "2.0.0")
            with pytest.raises(EdgekitError):
                client.load("linear")
    assert process.returncode == 0


def test_installed_model_is_tuned_by_its_name_and_served_so_after_the_next_load(
    maker: PackageMaker, packages: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slots = Slots(packages.parent / "state", maker.trust)
    for version in ("1.0.0", "2.0.0"):
        slots.install(write(maker, packages, version))
    tuned = Tuning("throughput", (), RunSetting(instances=2, batch=4), (0.5, 0.6), is_complete=True)
    monkeypatch.setattr("edgekit_runtime.commands.tune.tune", lambda *_, **__: tuned)
    keys = write_keys(packages.parent / "keys")
    with running(make_config(packages.parent), InstalledModels(slots)) as service:

        def scheduled() -> tuple[int, int]:
            loaded = service.call(lambda: service.service.registry.models.find("linear", None).loaded)
            return len(loaded.instances), loaded.scheduling.max_batch

        assert scheduled() == (1, 1)
        arguments = ["--state", str(slots.folder), "--keys", str(keys), "--json"]
        assert main(["tune", "linear", *arguments]) == 0
        assert "slot-2.0.0-" in read_json(capsys.readouterr().out)["package"]
        assert load(service).status == 200
        assert scheduled() == (2, 4)
        assert main(["tune", "other", *arguments]) == SlotError.exit_code
        assert main(["tune", "other.edgepkg", *arguments]) == PackageError.exit_code
