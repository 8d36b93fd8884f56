"""What of the fleet ends to be valid is said well before, with what to do."""

import json
import time
from pathlib import Path

import pytest
from sqlalchemy import select
from tests.fleet.test_fleet_commands import run

from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.manager.expiry import EXPIRY_ALARM, Expiry, alarm_expiries, list_expiries
from edgekit_fleet.operations import doctor
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.database import open_store, sqlite_url
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import AuditRow

DAY_S = 86_400.0


@pytest.fixture
def folder(tmp_path: Path) -> FleetFolder:
    """Return a fleet that was made just now."""
    made = FleetFolder(tmp_path / "fleet")
    made.write_settings(FleetSettings())
    Authority(made.identity).make_server(("fleet.example",))
    TufRepository(made.repository, made.repository_keys).create(time.time())
    return made


def find_due(folder: FleetFolder, days: float) -> dict[str, bool]:
    """Return what is due after so many days -> whether it is urgent; the manager signs metadata again."""
    authority = Authority(folder.identity)
    repository = TufRepository(folder.repository, folder.repository_keys)
    now = time.time() + days * DAY_S
    repository.refresh(now)
    return {one.what: one.is_urgent(now) for one in list_expiries(authority, repository) if one.is_due(now)}


@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (0, {}),
        (660, {}),
        (680, {"root": False, "server": False, "manager": False}),
        (710, {"root": True, "server": True, "manager": True}),
    ],
)
def test_root_and_certificates_are_due_sixty_days_before_their_end(
    folder: FleetFolder, days: float, expected: dict[str, bool]
) -> None:
    names = {
        "root of the repository": "root",
        "certificate of the server": "server",
        "certificate of the manager": "manager",
    }
    assert {names[what]: is_urgent for what, is_urgent in find_due(folder, days).items()} == expected


def test_authority_is_due_a_year_before_its_end(folder: FleetFolder) -> None:
    assert "certificate of the authority" not in find_due(folder, 18.9 * 365)
    assert find_due(folder, 19.2 * 365)["certificate of the authority"] is False


def test_metadata_that_nobody_signs_again_is_due(folder: FleetFolder) -> None:
    repository = TufRepository(folder.repository, folder.repository_keys)
    now = time.time() + 0.8 * DAY_S
    due = [one for one in list_expiries(Authority(folder.identity), repository) if one.is_due(now)]
    assert [one.what for one in due] == ["timestamp of the repository"]
    assert "see that it runs" in due[0].advice


def test_certificate_of_a_clock_that_was_ahead_is_urgent() -> None:
    made = Expiry(what="certificate of the server", begins_at=2e9, ends_at=3e9, notice_s=DAY_S, advice="")
    assert made.is_due(1e9) and made.is_urgent(1e9)
    assert "is not valid before 2033-05-18 03:33 UTC: a clock is or was wrong" in made.describe(1e9)


def test_doctor_says_what_ends_and_a_new_root_ends_that(
    folder: FleetFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "probe_own", list)
    place = ("--folder", folder.path)
    assert "nothing soon" in run(capsys, "doctor", *place).out
    early = TufRepository(folder.repository, folder.repository_keys)
    early.rotate(time.time() - 700 * DAY_S, roles=())
    said = " ".join(run(capsys, "doctor", *place).out.split())
    assert "act soon the root of the repository ends at" in said or "act now the root of" in said
    assert "edgekit fleet keys rotate" in said
    found = json.loads(run(capsys, "doctor", "--json", *place).out)["expiries"]
    assert {"authority", "server"} <= {one["what"].rpartition(" ")[2] for one in found}
    assert "signed again" in run(capsys, "keys", "rotate", *place).out
    assert "nothing soon" in run(capsys, "doctor", *place).out


def test_alarm_comes_once_a_day_for_each(tmp_path: Path) -> None:
    made = Expiry(what="root of the repository", ends_at=1e9, notice_s=60 * DAY_S, advice="sign it")
    store = open_store(sqlite_url(tmp_path / "store.sqlite"))
    for _ in range(2):
        with store.transaction() as session:
            alarm_expiries(session, [made], time.time())
    with store.transaction() as session:
        said = session.scalars(select(AuditRow).where(AuditRow.action == EXPIRY_ALARM)).all()
    assert [(row.subject, row.detail["advice"], row.detail["is_urgent"]) for row in said] == [
        (made.what, "sign it", True)
    ]
    store.close()
