"""`edgekit hil`, as a user calls it, with an OpenSSH server on loopback as the stand-in for a board."""

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as Xml

import pytest
from tests.hil.evidence_parts import EVIDENCE
from tests.hil.external_meter import ExternalMeter
from tests.hil.hil_process import run_hil
from tests.hil.ssh_board import SshBoard
from tests.runtime.power_tree import Tree
from yaml import safe_load

from edgekit_cli.cli import main
from edgekit_hil.benches.bench_file import read_bench
from edgekit_hil.benches.bench_lock import BenchLock
from edgekit_hil.benches.bench_writer import SshBench
from edgekit_host.evidence import MeasuredPower, read_evidence, write_evidence
from edgekit_offload.profiling import machine
from edgekit_offload.profiling.machine import Machine, RunnableGraph, time_batches
from edgekit_runtime.errors import BenchError, CutError
from edgekit_runtime.offload.measurement.job import JobResult, Timing
from edgekit_runtime.offload.measurement.machine_facts import describe_machine
from edgekit_toolkit.measurement.calibration_networks import (
    digest_calibration_models,
    make_calibration_networks,
)
from edgekit_toolkit.targets.figures import Figure, Source
from edgekit_toolkit.targets.loader import find_user_targets, load_target
from edgekit_toolkit.targets.spec import DeviceTimes
from edgekit_toolkit.targets.writer import write_target

pytestmark = pytest.mark.usefixtures("folder", "copied_commands")


def init(board: SshBoard, *more: str) -> int:
    place = ["--host", f"root@127.0.0.1:{board.port}", "--key", str(board.key), "--python", str(board.python)]
    return main(["hil", "init", *place, "--target", "x86-64", "--meter", "none", *more])


def test_init_writes_a_bench_and_shows_what_it_found(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(board, "--name", "desk") == 0

    file = read_bench(folder / "bench.yaml")
    assert (file.settings.name, file.settings.kind, file.settings.architecture) == ("desk", "real", "x86_64")
    shown = capsys.readouterr().out
    for text in ("onnxruntime", "Python", "tests with power cuts will be skipped", "next: edgekit hil run"):
        assert text in shown


def test_init_takes_a_command_that_reads_an_external_meter(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(board, "--meter", "command: echo 4.5 | cat") == 0

    assert "an external meter" in capsys.readouterr().out
    document = safe_load((folder / "bench.yaml").read_text())
    assert {"CommandMeterDriver": {"command": "echo 4.5 | cat"}} in document["targets"]["main"]["drivers"]


@pytest.mark.parametrize("meter", ["ina3221", "command:", "command: ", "the command: echo 1"])
def test_init_refuses_a_meter_that_it_does_not_know(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str], meter: str
) -> None:
    assert init(board, "--meter", meter) == 2

    assert "expected sensors, command:COMMAND or none" in " ".join(capsys.readouterr().err.split())
    assert not (folder / "bench.yaml").exists()


def test_device_of_a_bench_is_profiled_over_its_own_connection(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = ExternalMeter(folder, "4")

    def draw_and_time(*arguments: Any, **options: Any) -> Any:
        meter.show("14")
        try:
            return time_batches(*arguments, **options)
        finally:
            meter.show("4")

    monkeypatch.setattr(machine, "time_batches", draw_and_time)
    assert init(board, "--name", "desk", "--meter", f"command:{meter.command}") == 0
    file = folder / "bench.yaml"
    file.write_text(
        file.read_text().replace("CommandMeterDriver:", "CommandMeterDriver:\n        interval_s: 0.05")
    )
    capsys.readouterr()

    code = main(["profile", "--on", "bench.yaml", "--seconds", "1", "--json"])

    found = json.loads(capsys.readouterr().out)
    assert (code, found["label"], found["target"]) == (0, "measured", "x86-64-desk")
    assert main(["targets", "x86-64-desk"]) == 0
    assert "edgekit profile of" in " ".join(capsys.readouterr().out.split())
    target = load_target(found["target"], [find_user_targets()])
    assert target.device_times is not None
    assert any("edgekit profile of" in source.title for source in target.sources)
    (mode,) = target.power.modes
    assert found["power"] == {"idle_w": target.power.idle.value, "active_w": mode.active.value}
    assert found["power"] == {"idle_w": 4.0, "active_w": 14.0}
    assert (mode.active.status, mode.active.source) == ("measured", "profile")


@pytest.mark.parametrize(
    ("meter", "reason"),
    [
        ({}, "the meter reads only a part of the device: all rails of the board"),
        (
            {"command": "echo 9", "is_whole": False},
            "the meter reads only a part of the device: an external meter",
        ),
        ({"command": "echo 0"}, "meter: an external meter: 0 W at rest and 0 W meanwhile"),
        ({"command": "echo 9", "interval_s": 60}, "meter: an external meter: 1 readings"),
        (
            {"command": "echo >>read; [ $(wc -l <read) -lt 9 ] && echo 9"},
            "readings: the meter's command ended",
        ),
    ],
    ids=["sensors", "part", "nothing", "once", "fails"],
)
def test_meter_that_does_not_show_the_power_of_the_device_leaves_that_of_the_target(
    board: SshBoard,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    meter: dict[str, Any],
    reason: str,
) -> None:
    def time_nothing(_machine: Machine, graphs: list[RunnableGraph], **_options: Any) -> JobResult:
        time.sleep(1)  # while the meter is read
        return JobResult(describe_machine(), tuple(Timing(1e-3, 0.0, 5) for _ in graphs))

    monkeypatch.setattr(machine, "time_batches", time_nothing)
    Tree(folder / "sys").rail(1, "VDD_CPU", 5000, 300)
    sensors = {"SensorsDriver": {"python": str(board.python), "sysfs": str(folder / "sys")}}
    drivers = {"CommandMeterDriver": {"interval_s": 0.05, **meter}} if meter else sensors
    board.write_bench(folder / "bench.yaml", name="desk", kind="real", drivers=drivers)

    assert main(["profile", "--on", "bench.yaml", "--seconds", "1"]) == 0

    shown = " ".join(capsys.readouterr().out.split())
    assert "Power: that of the target, not measured; " in shown
    assert reason in shown
    target = load_target("x86-64-desk", [find_user_targets()])
    assert target.device_times is not None
    assert target.power == load_target("x86-64").power


def test_profile_of_what_is_no_bench_needs_a_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--on", "ssh:pi"]) == 2
    assert "name the device's --target" in capsys.readouterr().err


def test_profile_that_fails_does_not_break_a_bench(
    board: SshBoard, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert init(board, "--name", "desk") == 0
    arguments = ["profile", "--on", "bench.yaml", "--seconds", "1"]
    with monkeypatch.context() as failing:
        failing.setattr("edgekit_offload.profiling.machine.MEASURE", ("no", "such", "command"))
        assert main(arguments) == CutError.exit_code

    assert BenchLock.of(read_bench(folder / "bench.yaml")).describe() is None


def test_init_takes_a_target_by_its_name_alone(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = replace(load_target("x86-64"), name="my-board", aliases=())
    write_target(folder / "my-board.toml", target)
    place = ["--host", f"root@127.0.0.1:{board.port}", "--key", str(board.key), "--python", str(board.python)]
    command = ["hil", "init", *place, "--meter", "none", "--power", "none"]

    assert main([*command, "--target", "./my-board.toml"]) == BenchError.exit_code
    assert "tests take a target by its name; copy the file to" in " ".join(capsys.readouterr().err.split())
    write_target(find_user_targets() / "my-board.toml", target)
    assert main([*command, "--target", "my-board"]) == 0
    assert read_bench(folder / "bench.yaml").settings.target == "my-board"


def test_bench_on_which_durations_mean_nothing_is_not_profiled(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["profile", "--on", "arm64-userland", "--target", "rpi5"])

    assert code == BenchError.exit_code
    assert "durations on it are those of an emulator" in capsys.readouterr().err


def test_init_keeps_the_file_of_a_device_that_does_not_answer(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    host = f"root@127.0.0.2:{board.port}"

    code = main(["hil", "init", "--host", host, "--target", "x86-64", "--out", "a.yaml"])

    assert code == BenchError.exit_code
    assert "a.yaml is written, but the bench is not usable yet" in capsys.readouterr().err
    file = read_bench(folder / "a.yaml")
    assert file.identity == f"127.0.0.2_{board.port}"
    assert file.settings.python == "/opt/edgekit/current/bin/python"  # what `device install` makes


def test_init_replaces_no_file_without_force(board: SshBoard, folder: Path) -> None:
    (folder / "bench.yaml").write_text("mine")

    assert init(board) == 10
    assert (folder / "bench.yaml").read_text() == "mine"
    assert init(board, "--force") == 0


class Answers(io.StringIO):
    """A terminal at which a person has typed."""

    def isatty(self) -> bool:
        return True


def test_init_asks_for_host_target_power_switch_and_meter(
    board: SshBoard, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        f"root@127.0.0.1:{board.port}",
        "x86-64",
        "shelly_gen2:http://me:secret@127.0.0.1:0",
        "ina3221",
        "none",
    ]
    monkeypatch.setattr("sys.stdin", Answers("\n".join(answers) + "\n"))

    assert main(["hil", "init", "--key", str(board.key), "--python", str(board.python)]) == 0

    shown = capsys.readouterr().out
    for question in ("Host of the device", "Target, one of", "Power switch", "Power meter"):
        assert question in shown
    assert shown.count("Power meter of") == 2  # "ina3221" is no answer
    drivers = safe_load((folder / "bench.yaml").read_text())["targets"]["main"]["drivers"]
    assert [name for each in drivers for name in each] == ["SSHDriver", "NetworkPowerDriver"]
    assert (folder / "bench.yaml").stat().st_mode & 0o777 == 0o600  # it may hold a password, as here


def test_init_asks_nobody_where_nobody_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hil", "init", "--target", "x86-64"]) == 2
    assert "--host" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "power", "message"),
    [
        ("", None, "expected .USER@.HOST"),
        ("a@-oProxyCommand=x", None, "expected .USER@.HOST"),
        ("a@b:0", None, "expected .USER@.HOST"),
        ("a@fe80::1", None, "expected .USER@.HOST"),
        ("a@[::1]:2222", None, "expected .USER@.HOST"),
        ("a@b", "shelly_gen2", "expected MODEL:HOST:OUTLET"),
        ("a@b", "teapot:10.0.0.1:1", "knows no model 'teapot'"),
    ],
)
def test_malformed_host_or_switch_is_refused(host: str, power: str | None, message: str) -> None:
    with pytest.raises(BenchError, match=message):
        SshBench.parse(host, power=power)


@pytest.mark.parametrize(
    ("power", "driver"),
    [("shelly_gen2:http://10.0.0.5:0", "NetworkPowerDriver"), ("usb:1-1:2", "USBPowerDriver")],
)
def test_power_switch_is_written_as_labgrid_reads_it(
    board: SshBoard, folder: Path, power: str, driver: str
) -> None:
    init(board, "--power", power)

    main_target = safe_load((folder / "bench.yaml").read_text())["targets"]["main"]
    assert [name for each in main_target["drivers"] for name in each] == ["SSHDriver", driver]


def test_run_leaves_evidence_and_junit(board: SshBoard, folder: Path) -> None:
    board.write_bench(folder / "bench.yaml")

    options = ["--measure-seconds", "1", "--evidence", "seen", "--junit", "junit.xml"]
    done = run_hil("run", "-k", "italy and ort", *options)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stdout
    (path,) = (folder / "seen").glob("*.json")
    evidence = read_evidence(path)
    assert (evidence.bench, evidence.kind, evidence.target) == ("stand-in", "simulated", "x86-64")
    assert [each.outcome for each in evidence.tests] == ["passed"]
    assert evidence.tests[0].proves
    assert evidence.left_out > 20  # by -k
    assert evidence.figures[0].unit == ""
    assert evidence.network_times is None
    assert not find_user_targets().exists()  # a stand-in is not profiled
    assert Xml.parse(folder / "junit.xml").getroot().find(".//testcase") is not None  # noqa: S314


def test_run_on_a_real_device_profiles_it_once_and_keeps_the_times(board: SshBoard, folder: Path) -> None:
    read = f"echo >>{folder}/read; wc -l <{folder}/read"  # more and more watts
    rising = {"CommandMeterDriver": {"command": read, "interval_s": 0.05}}
    board.write_bench(folder / "bench.yaml", name="desk", kind="real", drivers=rising)
    options = ["--profile-seconds", "1", "--measure-seconds", "1", "--evidence", "seen"]

    done = run_hil("run", "-k", "memory_is_near and italy", *options)
    profile = find_user_targets() / "x86-64-desk.toml"
    first = profile.read_bytes()
    again = run_hil("run", "-k", "italy and tensorrt", *options)

    assert (done.returncode, again.returncode) == (0, 0), done.stdout + done.stderr + again.stdout
    assert profile.read_bytes() == first
    evidence = next(one for one in map(read_evidence, (folder / "seen").glob("*.json")) if one.figures)
    assert evidence.network_times is not None
    assert set(evidence.network_times.seconds) == set(make_calibration_networks())
    power = load_target(str(profile)).power
    assert evidence.network_times.power == MeasuredPower(power.idle.value, power.modes[0].active.value)
    latency = next(each for each in evidence.figures if each.unit == "ms")
    assert latency.predicted
    assert "prediction by edgekit profile of" in latency.method


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(
            {
                "seconds": dict.fromkeys(
                    make_calibration_networks(), Figure(1e-6, "s", "estimated", "profile")
                )
            },
            id="of an emulated device",
            marks=pytest.mark.long,
        ),
        pytest.param({"networks": "other"}, id="of other networks", marks=pytest.mark.long),
        pytest.param({"engine": "onnxruntime 0.1"}, id="with another engine", marks=pytest.mark.long),
        pytest.param({"device": "another board"}, id="of another board"),
    ],
)
def test_profile_that_does_not_hold_for_the_device_is_measured_again(
    board: SshBoard, folder: Path, change: dict[str, Any]
) -> None:
    board.write_bench(folder / "bench.yaml", name="desk", kind="real")
    here = describe_machine()
    seconds = dict.fromkeys(make_calibration_networks(), Figure(1e-6, "s", "measured", "profile"))
    times = DeviceTimes(here.cpu, here.engine, digest_calibration_models("ort"), seconds)
    base = load_target("x86-64")
    source = Source("profile", "a profile", "2026-11-23", derivation="a test")
    path = find_user_targets() / "x86-64-desk.toml"
    target = replace(
        base,
        name="x86-64-desk",
        aliases=(),
        device_times=replace(times, **change),
        sources=(*base.sources, source),
    )
    write_target(path, target)

    done = run_hil("run", "-k", "italy and tensorrt", "--evidence", "seen", "--profile-seconds", "1")

    assert "profile of bench 'desk'" in done.stdout, done.stdout + done.stderr
    found = load_target(str(path)).device_times
    assert found is not None
    assert replace(found, seconds=times.seconds, uncertainty=None) == times


def test_run_on_this_machine_itself_measures_no_profile_of_its_class(folder: Path) -> None:
    done = run_hil("run", "--bench", "local", "-k", "italy and tensorrt", "--evidence", "seen")

    assert done.returncode == 0, done.stdout + done.stderr
    assert not find_user_targets().exists()


def test_bench_whose_target_is_a_profile_is_not_profiled(board: SshBoard, folder: Path) -> None:
    base = load_target("x86-64")
    seconds = dict.fromkeys(make_calibration_networks(), Figure(1e-3, "s", "measured", "profile"))
    times = DeviceTimes("another board", "onnxruntime 1", digest_calibration_models("ort"), seconds)
    source = Source("profile", "a profile", "2026-11-23", derivation="a test")
    target = replace(
        base, name="x86-64-other", aliases=(), device_times=times, sources=(*base.sources, source)
    )
    write_target(find_user_targets() / "x86-64-other.toml", target)
    board.write_bench(folder / "bench.yaml", name="desk", kind="real", target="x86-64-other")

    done = run_hil("run", "-k", "italy and tensorrt", "--evidence", "seen", "--profile-seconds", "1")

    assert "is not profiled: x86-64-other is a profile" in done.stderr, done.stdout + done.stderr
    assert [path.name for path in find_user_targets().iterdir()] == ["x86-64-other.toml"]


def test_target_of_the_user_under_the_name_of_a_profile_is_kept(board: SshBoard, folder: Path) -> None:
    board.write_bench(folder / "bench.yaml", name="desk", kind="real")
    path = find_user_targets() / "x86-64-desk.toml"
    write_target(path, replace(load_target("x86-64"), name="x86-64-desk", aliases=()))
    before = path.read_bytes()

    done = run_hil("run", "-k", "italy and tensorrt", "--evidence", "seen")

    assert done.returncode == 0, done.stdout + done.stderr
    assert path.read_bytes() == before


def test_run_whose_evidence_cannot_be_written_is_refused_at_its_begin(board: SshBoard, folder: Path) -> None:
    board.write_bench(folder / "bench.yaml")
    (folder / "file").write_text("")

    done = run_hil("run", "--evidence", "file/seen")

    assert done.returncode == BenchError.exit_code
    assert "evidence cannot be written to file/seen: " in done.stderr
    assert "test session starts" not in done.stdout


def test_run_on_a_named_bench_that_is_held_fails_with_the_holder(board: SshBoard, folder: Path) -> None:
    file = read_bench(board.write_bench(folder / "bench.yaml"))
    with BenchLock.of(file).hold(keeps_state=False):
        done = run_hil("run", "-k", "italy and ort")

    assert done.returncode == BenchError.exit_code
    assert f"1 skipped: bench 'stand-in' is in use by process {os.getpid()} since" in done.stdout


def test_run_on_the_only_named_bench_ends_at_once_if_this_machine_cannot_have_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(folder / "empty"))
    done = run_hil("run", "--bench", "arm64-userland", "-k", "italy")

    assert done.returncode == BenchError.exit_code
    assert done.stdout.count("run `edgekit hil image` first") == 1
    assert "SKIPPED" not in done.stdout


def test_repaired_bench_can_be_used_again(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = BenchLock.of(read_bench(board.write_bench(folder / "bench.yaml")))
    with lock.hold(keeps_state=True):
        lock.mark_broken("smoke")

    assert main(["hil", "repaired", "bench.yaml"]) == 0
    assert "stand-in is in order again; it was: " in capsys.readouterr().out
    assert lock.describe() is None


def test_benches_lists_those_that_need_no_hardware(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hil", "benches"]) == 0
    assert "constrained" in capsys.readouterr().out


def test_run_of_no_test_and_of_no_bench_is_refused(folder: Path) -> None:
    assert run_hil("run", "--bench", "none.yaml").returncode == BenchError.exit_code
    assert run_hil("run", "-k", "no_such_test").returncode == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a file to another user")
def test_run_does_not_take_the_bench_of_another_user_by_itself(
    board: SshBoard, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(board) == 0
    os.chown("bench.yaml", 65534, 65534)

    assert main(["hil", "run"]) == BenchError.exit_code

    assert "belongs to another user, and can run code" in capsys.readouterr().err


def test_evidence_of_a_run_is_json_of_one_format(board: SshBoard, folder: Path) -> None:
    board.write_bench(folder / "bench.yaml")
    run_hil("run", "-k", "italy and tensorrt", "--evidence", "seen")

    (path,) = (folder / "seen").glob("*.json")
    content = json.loads(path.read_text())
    assert content["format"] == 1
    assert content["tests"][0]["reason"] == "the device of bench 'stand-in' has no tensorrt"


def test_targets_show_what_was_seen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_evidence(EVIDENCE, folder / "home" / "hil" / "evidence")

    assert main(["targets", "rpi5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert main(["targets", "rpi5", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)

    assert "real: bench desk, Pi 5" in shown
    assert "commit aaaaaaaaa" in shown
    assert "governor ondemand" in shown
    assert "1.5 ms" in shown
    assert [each["bench"] for each in document["evidence"] if each["kind"] == "real"] == ["desk"]


def test_target_without_evidence_says_that_it_is_modelled(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "rpi-zero-2w"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "energy are modelled by the coefficients below. No run on a bench yet" in shown
