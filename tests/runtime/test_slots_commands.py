"""`edgekit-device install`, `status`, `rollback` and `pin`, with and without a running service."""

import contextlib
import json
import os
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from tests.runtime.slot_cases import MODEL, VERSIONS, Bench, make_bench, write_keys
from tests.runtime.test_atomic_writes import mount_tmpfs

from edgekit_runtime.cli import main
from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import Slots
from edgekit_runtime.system import paths
from edgekit_runtime.system.paths import find_device_target, find_state_folder

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of its own: nothing of this machine's state, keys or service."""
    write_keys(tmp_path / "keys")
    (tmp_path / "run/edgekit").mkdir(parents=True)
    monkeypatch.setenv("EDGEKIT_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(paths, "SYSTEM_FOLDER", tmp_path / "system")
    monkeypatch.delenv("EDGEKIT_TARGET", raising=False)


@pytest.fixture
def bench(maker: Any, tmp_path: Path) -> Bench:
    (tmp_path / "packages").mkdir()
    for version in VERSIONS:
        maker.write(tmp_path / "packages" / f"{version}.edgepkg", version=version)
    return make_bench(tmp_path / "state", tmp_path / "packages", maker.trust)


@pytest.fixture
def run(bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command with --json; a version stands for its package."""

    def call(command: str, *arguments: str) -> tuple[int, dict[str, Any]]:
        given = [str(bench.packages / f"{a}.edgepkg") if a in VERSIONS else a for a in arguments]
        capsys.readouterr()
        code = main([command, *given, "--json", "--keys", str(tmp_path / "keys")])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[[Callable[[str], tuple[int, bytes]]], list[str]]]:
    """Starts a service at the usual place that answers by a function of the path; returns what was asked."""
    stack = contextlib.ExitStack()

    def start(answer: Callable[[str], tuple[int, bytes]]) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(self.path)
                status, body = answer(self.path)
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if body:
                    self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

            def address_string(self) -> str:
                return "unix"

        path = tmp_path / "run/edgekit/edgekit.sock"
        server = stack.enter_context(socketserver.UnixStreamServer(str(path), Handler))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        return asked

    with stack:
        yield start


def test_install_says_what_is_active_and_that_nobody_serves(run: Run) -> None:
    code, document = run("install", "1.0.0")
    assert (code, document) == (
        0,
        {
            "model": MODEL,
            "version": "1.0.0",
            "active": True,
            "on_trial": True,
            "pinned": None,
            "switched": False,
        },
    )


def test_install_tells_the_running_service(
    run: Run, serve: Callable[..., list[str]], bench: Bench, maker: Any
) -> None:
    def answer(_: str) -> tuple[int, bytes]:
        bench.begin()
        bench.slots.confirm(MODEL, "1.0.0")
        return 200, b""

    asked = serve(answer)
    code, document = run("install", "1.0.0")
    assert (code, document["switched"], document["on_trial"]) == (0, True, False)
    assert asked == ["/v2/repository/models/linear/load"]


def test_install_of_what_fails_in_the_service_says_why(
    run: Run, serve: Callable[..., list[str]], bench: Bench
) -> None:
    bench.prove("1.0.0")

    def answer(_: str) -> tuple[int, bytes]:
        bench.reject("2.0.0")
        return 200, b""

    serve(answer)
    code, document = run("install", "2.0.0")
    assert code == SlotError.exit_code
    assert (
        "linear 2.0.0: failed here and was rolled back: failed its self-test" in document["error"]["message"]
    )


@pytest.mark.parametrize(
    ("body", "said"), [(b'{"error": "no memory for it"}', "no memory for it"), (b"", "without a reason")]
)
def test_a_service_that_refuses_is_an_error_after_the_installation(
    body: bytes, said: str, run: Run, serve: Callable[..., list[str]], bench: Bench
) -> None:
    serve(lambda _: (503, body))
    code, document = run("install", "1.0.0")
    assert (code, said in document["error"]["message"]) == (SlotError.exit_code, True)
    assert bench.slots.models() == (MODEL,)


def test_a_socket_that_a_dead_service_left_is_no_service(run: Run, tmp_path: Path) -> None:
    with socketserver.UnixStreamServer(str(tmp_path / "run/edgekit/edgekit.sock"), BaseHTTPRequestHandler):
        pass
    assert run("install", "1.0.0")[1]["switched"] is False


def test_a_factory_package_is_installed_beside_the_slots(run: Run, bench: Bench) -> None:
    run("install", "1.0.0")
    code, document = run("install", "0.9.0", "--factory")
    assert (code, document["active"]) == (0, False)
    assert [place["place"] for place in run("status")[1]["models"][0]["places"]] == ["active", "factory"]


def test_rollback_goes_back_and_tells_the_service(
    run: Run, serve: Callable[..., list[str]], bench: Bench
) -> None:
    bench.prove("1.0.0")
    bench.prove("2.0.0")
    asked = serve(lambda _: (200, b""))
    assert run("rollback", MODEL) == (0, {"model": MODEL, "version": "1.0.0", "switched": True})
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("command", "option"),
    [(("install", "1.0.0"), "--allow-downgrade"), (("install", "3.0.0"), "--retry")],
)
def test_what_is_refused_is_allowed_by_its_option(
    command: tuple[str, str], option: str, run: Run, bench: Bench
) -> None:
    bench.prove("2.0.0")
    bench.install("3.0.0")
    bench.reject("3.0.0")
    code, document = run(*command)
    assert (code, option in document["error"]["message"]) == (SlotError.exit_code, True)
    assert run(*command, option)[0] == 0


def test_a_pinned_model_takes_no_other_version_until_it_is_unpinned(run: Run) -> None:
    assert run("install", "1.0.0", "--pin")[1]["pinned"] == "1.0.0"
    assert run("install", "2.0.0")[0] == SlotError.exit_code
    assert run("pin", MODEL, "--off") == (0, {"model": MODEL, "pinned": None})
    assert run("install", "2.0.0")[0] == 0
    assert run("pin", MODEL)[1]["pinned"] == "2.0.0"


def test_status_without_models_says_so(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["status"]) == 0
    assert capsys.readouterr().out == f"no models in {tmp_path / 'state'}\n"


def test_status_shows_versions_trials_damage_and_rejections(
    run: Run, bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench.prove("1.0.0")
    bench.install("2.0.0")
    bench.reject("2.0.0")
    bench.install("3.0.0")
    bench.begin()
    next((tmp_path / "state/models/linear").glob("slot-1.0.0-*")).write_bytes(b"x")
    code, document = run("status")
    (model,) = document["models"]
    assert (code, model["opens"]) == (0, "3.0.0")
    assert [(place["version"], place["health"], place["begun"]) for place in model["places"]] == [
        ("3.0.0", "unproven", 1),
        ("1.0.0", "healthy", 0),
    ]
    assert [place["problem"] is None for place in model["places"]] == [True, False]
    assert model["rejected"][0]["reason"] == "failed its self-test"
    main(["status", "--keys", str(tmp_path / "keys")])
    text = capsys.readouterr().out
    for expected in ("linear: opens 3.0.0", "on trial, 1 start", "DAMAGED", "rejected 2.0.0"):
        assert expected in text
    healthy = next(line for line in text.splitlines() if " 1.0.0 " in line)
    assert "healthy" in healthy
    assert "on trial" not in healthy
    assert "None" not in text


def test_status_says_what_is_wrong_with_the_state(
    run: Run, bench: Bench, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench.prove("1.0.0")
    (tmp_path / "state/models/linear/state.json").write_text("{")
    problem = run("status")[1]["models"][0]["problem"]
    assert "state.json" in problem
    main(["status", "--keys", str(tmp_path / "keys")])
    assert f"  {problem}" in capsys.readouterr().out


def test_status_fails_where_a_model_has_nothing_to_open(run: Run, bench: Bench, tmp_path: Path) -> None:
    bench.prove("1.0.0")
    next((tmp_path / "state/models/linear").glob("slot-*")).unlink()
    code, document = run("status")
    assert (code, document["models"][0]["opens"]) == (SlotError.exit_code, None)
    (tmp_path / "state/models/linear").chmod(0o777)
    assert "other users can write there" in run("status")[1]["models"][0]["why"]


def test_a_package_for_another_target_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_TARGET", "rpi5")
    assert find_device_target() == "rpi5"
    code, document = run("install", "1.0.0")
    assert (code, "this device is 'rpi5'" in document["error"]["message"]) == (SlotError.exit_code, True)


def test_an_untrusted_package_has_the_exit_code_of_signatures(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    path = str(bench.packages / "1.0.0.edgepkg")
    assert main(["install", path, "--keys", str(tmp_path / "empty")]) == 8


def test_the_state_folder_lies_where_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert find_state_folder() == tmp_path / "state"
    monkeypatch.delenv("EDGEKIT_STATE")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert find_state_folder() == Path("/var/lib/edgekit")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/xdg")
    assert find_state_folder() == Path("/xdg/edgekit")
    monkeypatch.delenv("XDG_STATE_HOME")
    assert find_state_folder() == Path.home() / ".local/state/edgekit"


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    folder = tmp_path / "mounted"
    folder.mkdir()

    def mount(options: str) -> Path:
        mount_tmpfs(folder, options)
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_keeps_the_active_version(
    run: Run, bench: Bench, mounted: Callable[[str], Path], maker: Any
) -> None:
    folder = mounted("size=40k,mode=0755")
    slots = Slots(folder, maker.trust)
    slots.install(bench.packages / "1.0.0.edgepkg")
    slots.begin_start(MODEL).package.close()
    slots.confirm(MODEL, "1.0.0")
    (folder / "filler").write_bytes(bytes(os.statvfs(folder).f_bavail * os.statvfs(folder).f_bsize))
    code, document = run("install", "2.0.0", "--state", str(folder))
    assert (code, "No space left" in document["error"]["message"]) == (SlotError.exit_code, True)
    assert run("status", "--state", str(folder))[1]["models"][0]["opens"] == "1.0.0"


def test_a_first_installation_on_a_full_disk_leaves_no_model(
    run: Run, mounted: Callable[[str], Path]
) -> None:
    folder = mounted("size=4k,mode=0755")
    assert run("install", "1.0.0", "--state", str(folder))[0] == SlotError.exit_code
    assert run("status", "--state", str(folder))[1]["models"] == []


def test_a_read_only_disk_starts_what_is_installed_and_refuses_to_change(
    run: Run, bench: Bench, mounted: Callable[[str], Path], maker: Any
) -> None:
    folder = mounted("size=100k,mode=0755")
    slots = Slots(folder, maker.trust)
    slots.install(bench.packages / "1.0.0.edgepkg")
    mount_tmpfs(folder, "remount,ro")
    code, document = run("install", "2.0.0", "--state", str(folder))
    assert (code, "Read-only file system" in document["error"]["message"]) == (SlotError.exit_code, True)
    with slots.begin_start(MODEL).package as package:
        assert package.manifest.version == "1.0.0"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to every folder")
def test_a_folder_without_permission_is_a_slot_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir(mode=0o500)
    assert run("install", "1.0.0")[0] == SlotError.exit_code
