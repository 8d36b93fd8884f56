"""`edgekit fleet release`, `rollout`, `rollback` and `tag`, from packages to what devices shall run."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from tests.fleet.new_fleet import copy_new_fleet
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as maker  # a fixture
from tests.runtime.slot_cases import write_keys

from edgekit_cli.cli import main
from edgekit_fleet.operations import releases
from edgekit_fleet.releases.delta_offers import Base
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.releases.withdrawn import list_withdrawn
from edgekit_fleet.rollouts.progress import Decision
from edgekit_fleet.rollouts.runner import RolloutRunner, log_entries
from edgekit_fleet.store.attributes import replace_attributes
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import DeviceRow, ExecutionRow, RolloutRow, WantedModelRow
from edgekit_runtime.agent.manager_keys import read_named
from edgekit_runtime.errors import FleetError, OutputError, PackageError, SignatureError


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[FleetFolder]:
    made = copy_new_fleet(tmp_path / "fleet")
    made.write_settings(FleetSettings())
    store = made.open_store()
    with store.transaction() as session:
        for number, target in enumerate(("x86-64", "x86-64", "rpi5", "jetson-orin-nano")):
            session.add(
                DeviceRow(
                    name=f"d{number}",
                    target=target,
                    tags={"site": "lyon"},
                    public_key=b"",
                    certificate_serial="1",
                    certificate_expires_at=4e9,
                    enrolled_at=0.0,
                    reported={"models": []},
                )
            )
        session.flush()
        replace_attributes(session, {f"d{number}": {} for number in range(4)})
    store.close()
    return made


class Shell:
    """Runs commands on a fleet and returns what they print as JSON."""

    def __init__(self, folder: FleetFolder, keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.keys, self.capsys = folder, keys, capsys

    def run(self, *arguments: str | Path, code: int = 0) -> Any:
        texts = [str(one) for one in arguments]
        got = main(["fleet", *texts, "--folder", str(self.folder.path), "--json"])
        printed = self.capsys.readouterr()
        assert got == code, printed.err
        return json.loads(printed.out.splitlines()[-1] if code else printed.out)

    def turn(self, runner: RolloutRunner, now: float) -> None:
        store: Store = self.folder.open_store()
        with store.transaction() as session:
            runner.turn(session, now)
            for row in session.scalars(select(ExecutionRow).where(ExecutionRow.state == "waiting")):
                row.state, row.changed_at, row.ended_at = "succeeded", now + 1, now + 1
        store.close()

    def wanted(self) -> dict[str, bool]:
        store = self.folder.open_store()
        with store.transaction() as session:
            found = {row.device: row.is_removed for row in session.scalars(select(WantedModelRow))}
        store.close()
        return found


@pytest.fixture
def shell(folder: FleetFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Shell:
    return Shell(folder, write_keys(tmp_path / "keys"), capsys)


@pytest.fixture
def packages(maker: PackageMaker, tmp_path: Path) -> list[Path]:
    paths = []
    for target in ("x86-64", "rpi5"):
        path = tmp_path / f"linear-1.0.0-{target}.edgepkg"
        maker.write(path, target=target)
        paths.append(path)
    return paths


def test_release_goes_out_and_is_rolled_back(shell: Shell, packages: list[Path]) -> None:
    (release,) = shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    assert [one[2] for one in release["packages"]] == ["rpi5", "x86-64"]
    offered = TufRepository(shell.folder.repository, shell.folder.repository_keys).list_targets()
    for target in ("rpi5", "x86-64"):
        coded, package = sorted(path for path in offered if path.startswith(f"{target}/"))
        assert package == f"{target}/linear-1.0.0-{target}.edgepkg" and coded.endswith(".ekdelta")
    plan = shell.run("rollout", "plan", "first", "--to", "site=lyon")
    assert [one["device"] for one in plan["planned"]] == ["d0", "d1", "d2"]
    assert plan["refused"][0]["code"] == "class" and plan["bytes"] > 0 and not shell.wanted()
    (rollout,) = shell.run("rollout", "start", "first", "--to", "site=lyon", "--soak", "0", "--waves", "100%")
    runner, now = RolloutRunner(), time.time()
    for number in range(4):
        shell.turn(runner, now + 2 * number)
    (watched,) = shell.run("rollout", "watch", rollout["name"])
    assert watched["state"] == "succeeded" and watched["members"] == {"succeeded": 3, "refused": 1}
    shell.run("rollback", rollout["name"], "--note", "customers complain")
    shell.turn(runner, now + 20)
    assert shell.run("rollout", "list")[0]["state"] == "aborted"
    assert shell.wanted() == {"d0": True, "d1": True, "d2": True}  # they ran nothing before


def test_release_without_a_name_leaves_out_one_that_somebody_gave(shell: Shell, packages: list[Path]) -> None:
    day = time.strftime("%Y-%m-%d", time.gmtime())
    shell.run("release", *packages, "--keys", shell.keys, "--name", f"{day}.2")
    (made,) = shell.run("release", packages[0], "--keys", shell.keys)
    assert made["name"] == f"{day}.3"


def test_replay_of_a_rollout_says_whether_its_log_decides_alike(shell: Shell, packages: list[Path]) -> None:
    shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    shell.run("rollout", "start", "first", "--to", "site=lyon", "--soak", "0", "--name", "r")
    runner, now = RolloutRunner(), time.time()
    for number in range(6):
        shell.turn(runner, now + 2 * number)
    assert shell.run("rollout", "replay", "r")["is_equal"]
    store = shell.folder.open_store()
    with store.transaction() as session:
        forged = Decision(action="pause", wave=0, sentence="nobody decided this")
        log_entries(session, "r", "mallory", [forged], now + 20)
    store.close()
    code = main(["fleet", "rollout", "replay", "r", "--folder", str(shell.folder.path), "--json"])
    found = json.loads(shell.capsys.readouterr().out)
    assert code == 1 and found["differences"][0]["logged"]["sentence"] == "nobody decided this"


def test_withdrawn_release_can_neither_be_fetched_nor_rolled_out(shell: Shell, packages: list[Path]) -> None:
    shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    shell.run("release", packages[0], "--keys", shell.keys, "--name", "second")
    shell.run("rollout", "start", "first", "--to", "site=lyon", "--name", "r")
    error = shell.run("withdraw", "first", code=FleetError.exit_code)["error"]
    assert "is used by rollout 'r'" in error["message"]
    shell.run("rollout", "abort", "r")
    shell.turn(RolloutRunner(), time.time())
    assert shell.run("withdraw", "first")["is_withdrawn"]
    offered = TufRepository(shell.folder.repository, shell.folder.repository_keys).list_targets()
    coded, package = sorted(offered)  # the other release has them, too
    assert package == "x86-64/linear-1.0.0-x86-64.edgepkg" and coded.startswith("x86-64/")
    shell.run("rollout", "plan", "first", "--to", "all", code=FleetError.exit_code)


def test_release_stays_offered_if_one_with_its_file_is_withdrawn_meanwhile(
    shell: Shell, packages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run("release", packages[0], "--keys", shell.keys, "--name", "first")
    store = shell.folder.open_store()

    def withdraw_first(*_: object) -> dict[str, object]:
        releases.withdraw_release(shell.folder, store, "first", "anna")
        return {}

    monkeypatch.setattr(releases, "publish_deltas", withdraw_first)
    shell.run("release", packages[0], "--keys", shell.keys, "--name", "second")
    store.close()
    offered = TufRepository(shell.folder.repository, shell.folder.repository_keys).list_targets()
    assert list(offered) == ["x86-64/linear-1.0.0-x86-64.edgepkg"]


def test_release_that_is_made_while_one_with_its_file_is_withdrawn_stays_offered(
    shell: Shell, packages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell.run("release", packages[0], "--keys", shell.keys, "--name", "first")
    withdraw = TufRepository.withdraw

    def release_second(self: TufRepository, paths: Any, now: float) -> None:
        shell.run("release", packages[0], "--keys", shell.keys, "--name", "second")
        withdraw(self, paths, now)

    monkeypatch.setattr(TufRepository, "withdraw", release_second)
    shell.run("withdraw", "first")
    offered = TufRepository(shell.folder.repository, shell.folder.repository_keys).list_targets()
    assert "x86-64/linear-1.0.0-x86-64.edgepkg" in offered


def test_release_without_an_earlier_one_shows_its_coded_file(shell: Shell, packages: list[Path]) -> None:
    (made,) = shell.run("release", packages[0], "--keys", shell.keys, "--name", "first")
    ((model, target, version, size_bytes),) = made["deltas"]
    assert (model, target, version) == ("linear", "x86-64", "")
    assert size_bytes < 0.8 * packages[0].stat().st_size
    main(["fleet", "release", "--list", "--folder", str(shell.folder.path)])
    assert f"linear for x86-64 coded: {size_bytes / 1e6:.3f} MB" in shell.capsys.readouterr().out


def test_device_is_offered_the_smallest_file_that_fits(
    shell: Shell, maker: PackageMaker, packages: list[Path], tmp_path: Path
) -> None:
    maker.write(tmp_path / "linear-2.0.0-x86-64.edgepkg", version="2.0.0")
    for name, package in (("first", packages[0]), ("second", tmp_path / "linear-2.0.0-x86-64.edgepkg")):
        shell.run("release", package, "--keys", shell.keys, "--name", name)
    releases_made = {release["name"]: release for release in shell.run("release", "--list")}
    assert [version for _, _, version, _ in releases_made["second"]["deltas"]] == ["", "1.0.0"]
    shell.run("rollout", "start", "second", "--to", "site=lyon", "--soak", "0", "--waves", "100%")
    for number in range(4):
        shell.turn(RolloutRunner(), time.time() + 2 * number)
    store = shell.folder.open_store()
    with store.snapshot() as session:
        documents = [row.document for row in session.scalars(select(WantedModelRow))]
    store.close()
    assert [[delta["from_sha256"] for delta in document["deltas"]] for document in documents] == [[""], [""]]


def test_release_whose_delta_starts_from_a_file_that_was_just_deleted_has_no_delta(
    shell: Shell, packages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = Base("0" * 64, shell.folder.repository / "targets" / "gone", "x86-64")
    monkeypatch.setattr(releases, "find_bases", lambda *_: (gone,))
    (made,) = shell.run("release", packages[0], "--keys", shell.keys, "--name", "first")
    assert [version for _, _, version, _ in made["deltas"]] == [""]  # the coded file alone


def test_withdrawal_that_was_cut_off_is_made_good(
    shell: Shell, packages: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OutputError("the disk is full")

    shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    shell.run("release", packages[0], "--keys", shell.keys, "--name", "second")
    with monkeypatch.context() as cut:
        cut.setattr(TufRepository, "withdraw", fail)
        shell.run("withdraw", "first", code=OutputError.exit_code)
    store = shell.folder.open_store()
    with store.snapshot() as session:
        assert list_withdrawn(session, time.time() - 60.0) == set()
        coded, package = sorted(list_withdrawn(session, time.time() + 60.0))
        assert package == "rpi5/linear-1.0.0-rpi5.edgepkg" and coded.startswith("rpi5/")
    store.close()


def test_keys_are_exchanged_and_the_root_names_the_new_ones(shell: Shell, packages: list[Path]) -> None:
    shell.run("release", *packages, "--keys", shell.keys)
    repository = TufRepository(shell.folder.repository, shell.folder.repository_keys)
    before = json.loads(repository.read_root(1))["signed"]["roles"]["timestamp"]["keyids"]
    assert shell.run("keys", "rotate", "timestamp", "class-rpi5")["rotated"] == ["timestamp", "class-rpi5"]
    assert json.loads(repository.read_root(2))["signed"]["roles"]["timestamp"]["keyids"] != before
    shell.run("keys", "rotate", "manager")
    assert (
        read_named(repository.read_root(2).decode())
        .keys()
        .isdisjoint(read_named(repository.read_root(3).decode()))
    )
    error = shell.run("keys", "rotate", "nobody", code=FleetError.exit_code)["error"]
    assert "no role nobody" in error["message"]


def test_release_takes_its_limit_from_its_own_evidence(
    shell: Shell, maker: PackageMaker, tmp_path: Path
) -> None:
    def plan(name: str, *options: str, **changes: Any) -> float:
        path = tmp_path / f"linear-{name}.0.0-x86-64.edgepkg"
        maker.write(path, version=f"{name}.0.0", **changes)
        shell.run("release", path, "--keys", shell.keys, "--name", name, *options)
        limit: float = shell.run("rollout", "plan", name, "--to", "all")["min_agreement"]
        return limit

    lost = {"score": {"metric": "accuracy", "drop_points": 1.5, "samples_kind": "held-back"}}
    quantized = {"score": {"metric": "agreement", "value": 0.98, "source_value": 1.0, "samples_kind": "data"}}
    random = {"score": {"metric": "agreement", "value": 0.3, "samples_kind": "generated"}}
    assert plan("1") == plan("2", figures=random) == 0.95
    assert plan("3", figures=lost) == pytest.approx(0.935)
    assert plan("4", figures=quantized) == pytest.approx(0.93)
    assert plan("5", "--min-agreement", "0.7", figures=lost) == 0.7
    shell.run("rollout", "start", "5", "--to", "all", "--name", "r")
    store = shell.folder.open_store()
    with store.transaction() as session:
        assert session.get_one(RolloutRow, "r").settings["limits"]["min_agreement"] == 0.7
    store.close()


def test_plan_refuses_by_memory_and_says_what_is_unknown(
    shell: Shell, maker: PackageMaker, tmp_path: Path
) -> None:
    store = shell.folder.open_store()
    with store.transaction() as session:
        session.get_one(DeviceRow, "d0").facts = {"memory_bytes": "1000000"}
    store.close()
    path = tmp_path / "linear-1.0.0-x86-64.edgepkg"
    maker.write(path, figures={"memory_estimate": {"bytes_above_engine": 1_433_444, "label": "estimated"}})
    shell.run("release", path, "--keys", shell.keys, "--name", "big")
    plan = shell.run("rollout", "plan", "big", "--to", "class=x86-64")
    (refused,), (planned,) = plan["refused"], plan["planned"]
    assert (refused["device"], refused["code"]) == ("d0", "memory") and "1433444" in refused["reason"]
    assert planned["device"] == "d1" and "memory_bytes" in planned["note"]


def test_two_packages_of_one_model_and_class_are_refused(
    shell: Shell, maker: PackageMaker, tmp_path: Path
) -> None:
    for version in ("1.0.0", "2.0.0"):
        maker.write(tmp_path / f"{version}.edgepkg", version=version)
    paths = [tmp_path / "1.0.0.edgepkg", tmp_path / "2.0.0.edgepkg"]
    error = shell.run("release", *paths, "--keys", shell.keys, code=FleetError.exit_code)["error"]
    assert "both model 'linear' for class 'x86-64'" in error["message"]
    assert not TufRepository(shell.folder.repository, shell.folder.repository_keys).list_targets()


def test_same_version_with_other_content_is_refused(
    shell: Shell, maker: PackageMaker, tmp_path: Path
) -> None:
    maker.write(tmp_path / "a.edgepkg")
    maker.write(tmp_path / "b.edgepkg", budget={"max_latency_ms": 11.0})
    shell.run("release", tmp_path / "a.edgepkg", "--keys", shell.keys)
    error = shell.run("release", tmp_path / "b.edgepkg", "--keys", shell.keys, code=PackageError.exit_code)[
        "error"
    ]
    assert "another version" in error["message"]
    assert len(shell.run("release", "--list")) == 1


def test_package_of_an_unknown_key_is_refused(shell: Shell, packages: list[Path], tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    shell.run("release", *packages, "--keys", tmp_path / "none", code=SignatureError.exit_code)


def test_tag_that_changes_a_rollout_asks_first(shell: Shell, packages: list[Path]) -> None:
    shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    shell.run("rollout", "start", "first", "--to", "site=lyon")
    error = shell.run("tag", "d0", "site=paris", code=FleetError.exit_code)["error"]
    assert "--yes" in error["message"]
    assert shell.run("tag", "d0", "floor=2")["tags"] == {"site": "lyon", "floor": "2"}
    assert shell.run("tag", "d0", "site=paris", "--yes")["tags"]["site"] == "paris"


def test_malformed_selector_shows_the_place(shell: Shell, packages: list[Path]) -> None:
    shell.run("release", *packages, "--keys", shell.keys, "--name", "first")
    error = shell.run("rollout", "plan", "first", "--to", "site=", code=FleetError.exit_code)["error"]
    assert "at character 6" in error["message"]
