"""Evidence of a real device turns the modelled latency of its class into a calibrated one."""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tests.hil.evidence_parts import EVIDENCE
from tests.toolkit.package_run import edgekit, mlp, package, saved

from edgekit_host import evidence as evidence_files
from edgekit_host.evidence import (
    Evidence,
    Figure,
    MeasuredPower,
    NetworkTimes,
    find_hil_folder,
    write_evidence,
)
from edgekit_runtime.errors import TargetError
from edgekit_runtime.offload.measurement.machine_facts import describe_engine
from edgekit_toolkit.evaluation.judge import model_on_target
from edgekit_toolkit.measurement.calibration_networks import (
    calibration_names,
    digest_calibration_models,
    make_calibration_models,
)
from edgekit_toolkit.measurement.measured_costs import find_costs, take_measured_costs
from edgekit_toolkit.samples.generated import Feeds
from edgekit_toolkit.targets.loader import load_target

pytestmark = pytest.mark.usefixtures("new_home")


@functools.cache
def times() -> NetworkTimes:
    seconds = dict.fromkeys(calibration_names(), 0.01)
    return NetworkTimes("2026-11-22", "onnxruntime 1.24.4", digest_calibration_models("ort"), seconds)


def measured() -> Evidence:
    latency = Figure(
        name="latency of a on ort", value=2.0, unit="ms", method="median of 50", test="t", predicted=2.2
    )
    return dataclasses.replace(EVIDENCE, target="rpi4", network_times=times(), figures=(latency,))


def metered() -> Evidence:
    power = MeasuredPower(2.0, 5.5)
    return dataclasses.replace(measured(), network_times=dataclasses.replace(times(), power=power))


def keep(evidence: Evidence) -> None:
    write_evidence(evidence, find_hil_folder() / "evidence")


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = package(
        saved(mlp(), folder / "net.onnx"), folder / "out", "--json", target="rpi4"
    ).json
    return found


def words(*arguments: str) -> str:
    """Return what a command prints, without its line breaks."""
    return " ".join(edgekit(*arguments).stdout.split())


def test_package_predicts_by_the_evidence_of_a_real_device_and_names_it(tmp_path: Path) -> None:
    keep(measured())

    found = report(tmp_path)

    labels = {one["figures"]["latency"]["label"] for one in found["candidates"]}
    assert labels == {"calibrated"}
    assert {one["figures"]["energy"]["label"] for one in found["candidates"]} == {"modelled"}
    assert found["target"]["cost_source"] == (
        f"Pi 5, onnxruntime 1.24.4, evidence {measured().file_name}, 2026-11-22"
    )
    note = "latency is predicted from times of onnxruntime 1.24.4 on the device, and this machine has"
    assert (note in " ".join(found["warnings"])) == (describe_engine("ort") != "onnxruntime 1.24.4")


@pytest.mark.parametrize("kind", ["emulated", "simulated"])
def test_package_does_not_take_the_times_of_an_emulated_device(
    tmp_path: Path, kind: Literal["emulated", "simulated"]
) -> None:
    keep(dataclasses.replace(measured(), kind=kind))

    found = report(tmp_path)

    assert {one["figures"]["latency"]["label"] for one in found["candidates"]} == {"modelled"}
    assert found["target"]["cost_source"] == "coefficients of rpi4"


def test_newest_times_count_also_beside_a_later_run_without_any() -> None:
    older = dataclasses.replace(measured(), date="2026-11-20T10:00:00+00:00")
    later = dataclasses.replace(measured(), date="2026-11-25T10:00:00+00:00", network_times=None)
    for evidence in (older, measured(), later):
        keep(evidence)

    assert find_costs(load_target("rpi4")) == (measured(), times())


def test_power_that_a_meter_read_beside_the_times_makes_energy_calibrated() -> None:
    keep(metered())

    target = take_measured_costs(load_target("rpi4"))

    feeds: Feeds = {"input": np.zeros((1, 48), np.float32)}
    (found,) = model_on_target([make_calibration_models("ort")["dense-small"]], target, {}, feeds)
    assert (found.latency_label, found.energy_label) == ("calibrated", "calibrated")
    assert found.energy_mj == pytest.approx(5.5 * (found.latency_ms or 0.0))
    assert "5.5 W, which a meter read" in words("targets", "rpi4")


@pytest.mark.parametrize("active_w", ["0.0", "2.0", "5000.0", "NaN"])
def test_evidence_with_a_power_that_no_device_has_is_left_out(active_w: str) -> None:
    keep(metered())
    (path,) = (find_hil_folder() / "evidence").iterdir()
    path.write_text(path.read_text().replace('"active_w": 5.5', f'"active_w": {active_w}'))

    assert find_costs(load_target("rpi4")) is None
    assert "calibrated" not in words("targets", "rpi4")


def test_times_of_other_networks_are_not_used() -> None:
    keep(dataclasses.replace(measured(), network_times=dataclasses.replace(times(), networks="another")))

    assert find_costs(load_target("rpi4")) is None


def test_times_that_lack_a_network_are_not_used() -> None:
    missing = dict(list(times().seconds.items())[1:])
    keep(dataclasses.replace(measured(), network_times=dataclasses.replace(times(), seconds=missing)))

    assert find_costs(load_target("rpi4")) is None


def test_times_that_no_device_has_are_refused_with_the_file_that_states_them() -> None:
    wrong = dataclasses.replace(times(), seconds={**times().seconds, "call": 0.0})
    evidence = dataclasses.replace(measured(), network_times=wrong)
    keep(evidence)

    with pytest.raises(TargetError, match=f"{evidence.file_name}: seconds.call: expected"):
        take_measured_costs(load_target("rpi4"))


def test_target_that_prefers_another_engine_has_no_use_for_times() -> None:
    keep(dataclasses.replace(measured(), target="android-arm64"))

    assert find_costs(load_target("android-arm64")) is None


def test_target_with_several_power_modes_has_no_use_for_times() -> None:
    keep(measured())
    target = load_target("rpi4")
    (mode,) = target.power.modes
    power = dataclasses.replace(target.power, modes=(mode, dataclasses.replace(mode, name="slow")))

    assert find_costs(target) == (measured(), times())
    assert find_costs(dataclasses.replace(target, power=power)) is None


@pytest.mark.parametrize("newest", ["committed", "own"])
def test_newest_times_count_whether_committed_or_of_the_user(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence_files, "list_committed", lambda: tmp_path / "committed")
    later = "2026-11-25T10:00:00+00:00"
    dates = {"committed": measured().date, "own": measured().date, newest: later}
    committed, own = (
        dataclasses.replace(measured(), date=dates[of], bench=of) for of in ("committed", "own")
    )
    write_evidence(committed, tmp_path / "committed")
    keep(own)

    assert find_costs(load_target("rpi4")) == (own if newest == "own" else committed, times())


def test_targets_say_on_which_device_and_when_costs_were_measured() -> None:
    assert "modelled by the coefficients below" in words("targets", "rpi4")
    keep(measured())

    shown = words("targets", "rpi4")

    assert "Latency is calibrated: measured on Pi 5 by bench desk, 2026-11-22" in shown
    assert "predicted 1 latencies of whole models, +10% off at worst" in shown
    assert " costs " in words("targets")
