import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnxruntime")

from edgekit_runtime.autotune.contest import RunSetting
from edgekit_runtime.autotune.tune import SettingSearch, Tuning, list_settings
from edgekit_runtime.cli import main
from edgekit_runtime.errors import BackendError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.package.manifest import BackendChoice
from edgekit_runtime.sessions import open_session, register
from edgekit_runtime.sessions.latency import Latency
from edgekit_runtime.sessions.local_results import Tuned, apply_tuned, keep_tuned, recall_tuned
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.signing_keys import find_keys_folder, load_signer

pytestmark = pytest.mark.usefixtures("copied_children_of_test")

OWN = RunSetting()


class Room:
    """Measuring processes on a clock of their own: medians as stated with noise of 1 %, ten runs each.

    A setting with two times has one of them in each process, by chance.
    """

    def __init__(self, seconds: Mapping[RunSetting, float | tuple[float, float]]) -> None:
        self.seconds, self.now_s = seconds, 0.0
        self.noise = np.random.default_rng(0)
        self.processes: list[int] = []

    def measure(
        self, settings: Sequence[RunSetting], *, rounds: int, seconds: float, seed: int
    ) -> Sequence[float | str]:
        self.processes.append(len(settings))
        return [self._run(setting) for setting in settings]

    def _run(self, setting: RunSetting) -> float | str:
        if setting not in self.seconds:
            return "no such option here"
        stated = self.seconds[setting]
        median_s = float(self.noise.choice(stated) if isinstance(stated, tuple) else stated)
        self.now_s += 10 * median_s
        return median_s * self.noise.uniform(0.99, 1.01)

    def search(self, maker: Any, seconds: float = 100.0, *extra: RunSetting) -> Tuning:
        search = SettingSearch(
            measure=self.measure, manifest=maker.manifest(), end_s=seconds, clock=lambda: self.now_s
        )
        return search.run(list(dict.fromkeys([OWN, *self.seconds, *extra])), "latency")


def threads(count: int) -> RunSetting:
    return RunSetting(options=(("threads", count),))


def ways(*seconds: float | tuple[float, float]) -> dict[RunSetting, float | tuple[float, float]]:
    """The package's own setting, then others."""
    return dict(zip([OWN, *map(threads, range(1, len(seconds)))], seconds, strict=True))


def test_the_fastest_setting_is_kept_with_its_interval(maker: Any) -> None:
    tuning = Room(ways(0.010, 0.012, 0.006, 0.009, 0.020, 0.0065)).search(maker)
    assert tuning.best == threads(2)
    assert tuning.interval[0] <= 0.6 <= tuning.interval[1] < 0.63
    assert tuning.is_complete


def test_better_settings_are_measured_in_more_processes(maker: Any) -> None:
    room = Room(ways(0.010, 0.012, 0.006, 0.009, 0.020))
    counts = {trial.setting: trial.processes for trial in room.search(maker).trials}
    assert [counts[threads(n)] for n in (2, 3, 4)] == [21, 6, 3]
    assert room.processes == [5] * 3 + [3] * 3 + [2] * 15


def test_of_settings_that_are_as_fast_the_one_with_fewer_threads_is_kept(maker: Any) -> None:
    assert Room(ways(0.010, 0.00605, 0.006)).search(maker).best == threads(1)


def test_a_setting_that_is_fast_in_half_of_the_processes_only_is_not_kept(maker: Any) -> None:
    tuning = Room(ways(0.010, (0.006, 0.012), 0.02)).search(maker)
    assert tuning.best == OWN


@pytest.mark.parametrize("best", [0.010, 0.0099, 0.0098, 0.015])
def test_what_is_hardly_better_is_not_kept(best: float, maker: Any) -> None:
    tuning = Room(ways(0.010, best, 0.02)).search(maker)
    assert (tuning.best, tuning.interval) == (OWN, (1.0, 1.0))


@pytest.mark.parametrize(("seconds", "is_kept"), [(0.009, False), (0.008, True)])
def test_spinning_must_win_by_more(seconds: float, is_kept: bool, maker: Any) -> None:
    spinning = RunSetting(options=(("spinning", True),))
    tuning = Room({OWN: 0.010, spinning: seconds}).search(maker)
    assert (tuning.best == spinning) == is_kept


def test_a_setting_that_the_engine_refuses_is_named_and_left_out(maker: Any) -> None:
    tuning = Room(ways(0.010, 0.005)).search(maker, 100.0, RunSetting(options=(("odd", True),)))
    assert [trial.reason for trial in tuning.trials] == [None, None, "no such option here"]
    assert tuning.best == threads(1)


def test_a_package_that_does_not_run_is_not_tuned(maker: Any) -> None:
    with pytest.raises(BackendError, match="as packaged: no such option"):
        Room({}).search(maker, 100.0, threads(1))


def test_the_time_is_kept_with_slow_models(maker: Any) -> None:
    room = Room(ways(1.0, 1.2, 0.5, 0.9, 2.0, 0.8))
    tuning = room.search(maker, seconds=120.0)
    assert 60 < room.now_s < 160
    assert (tuning.best, tuning.is_complete) == (OWN, False)
    assert min((trial.ratio or 9, trial.setting) for trial in tuning.trials)[1] == threads(2)


def test_where_the_time_does_not_suffice_nothing_is_kept(maker: Any) -> None:
    room = Room(ways(1.0, 0.5))
    tuning = room.search(maker, seconds=5.0)
    assert (tuning.best, tuning.is_complete) == (OWN, False)
    assert room.processes == [2]


@pytest.mark.parametrize(
    ("options", "processors", "expected"),
    [
        ({"threads": 1}, 1, ["as packaged", "arena off"]),
        ({"threads": 1}, 2, ["as packaged", "threads 2", "threads 2, spinning on", "arena off"]),
        ({}, 6, ["as packaged", *(f"threads {n}" for n in (1, 2, 4, 6)),
                 *(f"threads {n}, spinning on" for n in (2, 4, 6)), "arena off"]),
    ],
)  # fmt: skip
def test_the_grid_has_what_matters(options: dict[str, Any], processors: int, expected: list[str]) -> None:
    choice = BackendChoice("ort", "model.onnx", options)
    settings = list_settings(choice, "latency", processors, may_batch=False)
    assert [setting.name for setting in settings] == expected


def test_for_throughput_batches_and_runs_at_once_are_tried() -> None:
    choice = BackendChoice("litert", "model.tflite", {"threads": 2})
    settings = list_settings(choice, "throughput", 4, may_batch=True)
    assert RunSetting(options=(("threads", 1),), instances=4, batch=16) in settings
    assert "threads 1, 2 instances, batch 4" in {setting.name for setting in settings}
    assert RunSetting(batch=4) in settings
    assert all(s.batch == 1 for s in list_settings(choice, "throughput", 4, may_batch=False))


def test_the_interval_of_a_ratio_holds_it() -> None:
    noise = np.random.default_rng(1)
    one = Latency(tuple(noise.uniform(0.9, 1.1, 100).tolist()))
    two = Latency(tuple(2 * s for s in one.seconds))
    assert two.ratio_interval_to(one) == pytest.approx((2.0, 2.0))
    low, high = Latency((1.0, 2.0, 3.0)).ratio_interval_to(Latency((1.0, 1.0, 1.0)))
    assert (low, high) == (1.0, 3.0)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def make(maker: Any, tmp_path: Path) -> Callable[..., Path]:
    def make(backend: BackendChoice, **changes: Any) -> Path:
        path = tmp_path / "x.edgepkg"
        write_package(path, maker.manifest(backend=backend, **changes), maker.artifacts, load_signer())
        return path

    return make


ORT = BackendChoice("ort", "model.onnx", {"threads": 1})


@pytest.mark.parametrize("objective", ["latency", pytest.param("throughput", marks=pytest.mark.long)])
def test_the_command_shows_every_setting_and_keeps_the_result(
    objective: str, make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = make(BackendChoice("absent", "model.onnx", {}, ORT))
    assert main(["tune", str(path), "--seconds", "0.3", "--json", "--objective", objective]) == 0
    output = capsys.readouterr()
    document = json.loads(output.out)
    assert document["backend"] == "ort"  # the next engine, where the first is not installed
    assert document["settings"][0]["name"] == "as packaged"
    assert document["settings"][0]["processes"] > 0
    assert any(s["batch"] == 16 for s in document["settings"]) == (objective == "throughput")
    kept = json.loads(Path(document["kept_in"]).read_text())
    assert (kept["label"], kept["objective"]) == ("measured", objective)
    assert kept["options"] == document["best"]["options"]
    assert open_session(path).run({"x": np.zeros((1, 4), np.float32)})["y"].shape == (1, 2)


def test_the_command_prints_a_table(make: Callable[..., Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(make(ORT)), "--seconds", "0.3"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines()[0].split() == ["setting", "ms", "a", "run", "of", "own", "processes"]
    assert "as packaged" in output.out.splitlines()[1]
    assert "kept: " in output.out.splitlines()[-1]
    assert "process 1 of at most 3" in output.err


def test_a_backend_without_options_of_speed_is_refused(
    make: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", str(make(BackendChoice("other", "model.onnx")))]) == BackendError.exit_code
    assert "nothing to tune" in capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon"])
def test_odd_seconds_are_a_usage_error(seconds: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["tune", "x", "--seconds", seconds])
    assert stopped.value.code == 2


def test_a_kept_result_changes_the_options_that_a_session_is_opened_with(
    make: Callable[..., Path],
) -> None:
    path = make(BackendChoice("absent", "model.onnx", {}, ORT))
    opened: list[Mapping[str, Any]] = []
    engine = find_engine(ORT.name)

    def open_and_record(package: Any, choice: BackendChoice, threads: int | None) -> Any:
        opened.append(choice.options)
        assert engine.open is not None
        return engine.open(package, choice, threads)

    register(replace(engine, open=open_and_record))
    try:
        with read_package(path, TrustStore.from_folder(find_keys_folder())) as package:
            keep_tuned(package.manifest, ORT, Tuned("latency", {"arena": False}))
            open_session(package).close()
    finally:
        register(engine)
    assert opened == [{"threads": 1, "arena": False}]


def test_a_result_of_another_package_or_machine_counts_for_nothing(
    make: Callable[..., Path], maker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, other = maker.manifest(backend=ORT), maker.manifest(backend=ORT, version="2.0.0")
    path = keep_tuned(manifest, ORT, Tuned("latency", {"threads": 2}))
    assert apply_tuned(manifest, ORT).options == {"threads": 2}
    assert apply_tuned(other, ORT) == ORT
    document = json.loads(path.read_text())
    for change in ({"engine": "0.0.1"}, {"processors": 999}, {"options": {"optimise": False}}, {"batch": 0},
                   {"instances": True}, {"options": None}):  # fmt: skip
        path.write_text(json.dumps({**document, **change}))
        assert recall_tuned(manifest, ORT) is None
    path.write_text("[")
    assert recall_tuned(manifest, ORT) is None
