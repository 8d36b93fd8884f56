"""The release of the engine that devices run has the last word about a package."""

import os
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.toolkit.fake_onnxruntime import write_aborting_onnxruntime
from tests.toolkit.package_run import mlp, package, saved, tiny

from edgekit_host.pinned_packages import read_pinned
from edgekit_runtime.errors import SlowOpeningError
from edgekit_toolkit.packaging import device_engine
from edgekit_toolkit.packaging.device_engine import FETCH_VARIABLE, find_device_engine

pytestmark = pytest.mark.usefixtures("home")
OPTIONS = ("--backend", "ort", "--search-seconds", 0, "--json")


def pinned_release() -> str:
    pinned = read_pinned("ort", platform.machine(), platform.python_version())
    return next(line for line in pinned if line.startswith("onnxruntime==")).split("==")[1].split()[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(FETCH_VARIABLE, "fetch")
    return tmp_path / "cache"


def install_release(cache: Path, *aborts_on: bytes, first: bytes = b"") -> None:
    """Put the device's release into the cache; without operators it aborts on nothing."""
    tag = f"onnxruntime-{pinned_release()}-{sys.implementation.cache_tag}-{platform.machine()}"
    write_aborting_onnxruntime(cache / "engines" / tag, *aborts_on, first=first)


def needs_other_release() -> None:
    if sys.version_info < (3, 11):
        pytest.skip("on Python 3.10 this host runs the release of devices")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(mlp(1), tmp_path / "net.onnx")


def report_of(model: Path, out: Path, *options: object) -> dict[str, Any]:
    outcome = package(model, out, *OPTIONS, *options)
    assert outcome.code == 0, outcome.stderr
    return outcome.json


def test_form_on_which_the_release_of_devices_aborts_gives_way_to_the_next_one(
    tmp_path: Path, cache: Path
) -> None:
    needs_other_release()
    # On no operator: the processor decides which form is the fastest, and so the first.
    install_release(cache, first=b"image")  # the name of the input
    source, data = tiny("digits_cnn", calibration_samples=16, evaluation_samples=60)
    report = report_of(source, tmp_path / "out", *data)
    refusals = [text for text in report["warnings"] if "SIGABRT" in text and "vector::operator[]" in text]
    (chosen,) = (one for one in report["candidates"] if one["chosen"])
    assert refusals
    assert not [text for text in refusals if f"refuses {chosen['id']}:" in text]
    release = f"onnxruntime {pinned_release()}"
    assert report["proof"] == {"engine": release, "device_engine": release, "note": ""}


def test_model_on_which_the_release_of_devices_always_aborts_is_refused_with_the_reason(
    model: Path, tmp_path: Path, cache: Path
) -> None:
    needs_other_release()
    install_release(cache, b"x")  # the name of the input, in every form
    outcome = package(model, tmp_path / "out", *OPTIONS)
    assert outcome.code == 5
    reason = outcome.error["message"]
    assert ("refuses every candidate" in reason, "SIGABRT" in reason) == (True, True)


def test_release_of_devices_that_cannot_be_fetched_is_said_in_one_line_and_remembered_for_some_minutes(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_other_release()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    note = report_of(model, tmp_path / "out")["proof"]["note"]
    assert f"devices run onnxruntime {pinned_release()}: pip cannot fetch it" in note
    assert "\n" not in note
    (failure,) = (cache / "engines").iterdir()
    assert failure.suffix == ".failed"
    said: list[str] = []
    remembered = find_device_engine("ort", said.append)
    assert "next try after 10 minutes" in remembered.problem
    assert said == []
    os.utime(failure, (0, 0))
    assert find_device_engine("ort", said.append) == remembered
    assert len(said) == 1


def test_proof_that_is_switched_off_fetches_nothing_and_is_said(
    model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_other_release()
    monkeypatch.setenv(FETCH_VARIABLE, "off")
    assert f"{FETCH_VARIABLE} is off" in report_of(model, tmp_path / "out")["proof"]["note"]
    assert not cache.exists()


@pytest.mark.parametrize(("slow", "note"), [(1, ""), (2, "Not opened with onnxruntime")])
def test_release_of_devices_that_opens_a_package_too_slowly_here_refuses_nothing(
    slow: int, note: str, model: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_other_release()
    install_release(cache)
    tries = iter([SlowOpeningError("the machine is busy")] * slow)

    def open_slowly(*_: object, **__: object) -> str:
        if (error := next(tries, None)) is not None:
            raise error
        return ""

    monkeypatch.setattr(device_engine, "test_in_child", open_slowly)
    report = report_of(model, tmp_path / "out")
    assert not [text for text in report["warnings"] if "refuses" in text]
    assert report["proof"]["note"].startswith(note)
    assert (report["proof"]["engine"] == report["proof"]["device_engine"]) == (slow == 1)
