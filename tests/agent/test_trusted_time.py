"""A device whose clock is wrong: what it knows of the time, and whom it connects to."""

import json
import socket
import time
from datetime import timedelta

import pytest
from tests.agent.parts import make_enrolment
from tests.agent.test_link_status import make_server, shake_hands
from tests.agent.test_mqtt_link import make_authority
from tests.fleet.test_web import invite, site  # noqa: F401  # a fixture
from tests.toolkit.cases import cases

from edgekit_runtime.agent.documents import EnrolmentCode
from edgekit_runtime.agent.enrolment import enrol, renew
from edgekit_runtime.agent.journal import Journal, JournalRecord
from edgekit_runtime.agent.membership import Membership, explain_failure
from edgekit_runtime.agent.trusted_time import FIELD, MAX_LEAD_S, RELEASED_S, TrustedTime, read_validity
from edgekit_runtime.cli import main
from edgekit_runtime.errors import TransportError

DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
DAY = timedelta(days=1)
BEHIND = {"1970": 0.0, "2015": 1.42e9}
STATED_S = RELEASED_S + 100 * DAY_S


def wrong_time(clock_s, **options):
    return TrustedTime(clock=lambda: clock_s, **options)


def ahead():
    return TrustedTime(clock=lambda: time.time() + 10 * YEAR_S)


def write_timestamp(folder, signed):
    (folder / "tuf").mkdir()
    (folder / "tuf" / "timestamp.json").write_text(json.dumps({"signed": signed}))
    return folder


# The bound


@pytest.mark.parametrize("clock_s", BEHIND.values(), ids=BEHIND)
def test_bound_is_the_newest_document_and_the_time_since(clock_s):
    passed_s = 0.0
    trusted_time = TrustedTime(clock=lambda: clock_s, monotonic=lambda: passed_s)
    assert (trusted_time.now_s, trusted_time.stated_s, trusted_time.is_clock_behind) == (
        RELEASED_S,
        0.0,
        True,
    )
    trusted_time.note(STATED_S)
    passed_s = 2 * DAY_S
    assert trusted_time.now_s == STATED_S + 2 * DAY_S
    assert trusted_time.explain().startswith("the clock says 19" if clock_s == 0.0 else "the clock says 20")


def test_right_clock_counts_and_is_not_called_wrong():
    trusted_time = wrong_time(STATED_S + DAY_S)
    trusted_time.note(STATED_S)
    assert (trusted_time.now_s, trusted_time.explain()) == (STATED_S + DAY_S, "")


def test_clock_that_is_set_later_counts_from_then_on():
    clock_s = 0.0
    trusted_time = TrustedTime(clock=lambda: clock_s)
    trusted_time.note(STATED_S)
    clock_s = STATED_S + YEAR_S
    assert (trusted_time.now_s, trusted_time.is_clock_behind) == (clock_s, False)


def test_clock_that_was_ahead_leaves_nothing_behind():
    clock_s = STATED_S + 10 * YEAR_S
    trusted_time = TrustedTime(clock=lambda: clock_s, monotonic=lambda: 0.0)
    trusted_time.note(STATED_S)
    assert trusted_time.now_s == clock_s
    clock_s = STATED_S
    assert (trusted_time.now_s, trusted_time.least_s) == (STATED_S, STATED_S)


def test_time_that_a_thief_of_the_managers_key_states_is_cut(tmp_path):
    stolen = wrong_time(STATED_S, monotonic=lambda: 0.0)
    stolen.note(2.0**52)
    assert stolen.least_s == STATED_S + MAX_LEAD_S
    stolen.note(0.0)  # a root has named another key
    assert stolen.least_s == RELEASED_S
    folder = write_timestamp(tmp_path, {FIELD: 2**52})
    assert wrong_time(STATED_S, monotonic=lambda: 0.0, folder=folder).least_s == STATED_S + MAX_LEAD_S


def test_bound_without_a_document_is_the_timestamp_and_then_the_certificate(tmp_path):
    authority, _ = make_authority(tmp_path / "authority")
    pem = authority.certificate_path.read_text()
    options = {"certificate": pem, "monotonic": lambda: 0.0}
    assert abs(wrong_time(0.0, **options).least_s - max(RELEASED_S, time.time() - DAY_S)) < 600.0
    folder = write_timestamp(tmp_path, {FIELD: STATED_S})
    assert wrong_time(0.0, folder=folder, **options).least_s == STATED_S


@cases(
    "signed",
    [{}, [], None, {FIELD: "soon"}, {FIELD: -1}, {FIELD: float("inf")}, {FIELD: 10**400}, {FIELD: []}],
)
def test_timestamp_without_a_time_is_none(tmp_path, signed):
    assert wrong_time(0.0, folder=write_timestamp(tmp_path, signed)).least_s == RELEASED_S


def test_bound_outlives_a_restart_and_a_torn_journal(tmp_path):
    member = Membership(enrolment=make_enrolment(), key=None, folder=tmp_path)
    folder = write_timestamp(tmp_path, {FIELD: RELEASED_S + DAY_S})
    Journal(folder / "journal.json").write(JournalRecord(known_time_s=STATED_S))
    assert member.read_time(folder, lambda: 0.0).least_s >= STATED_S
    (folder / "journal.json").unlink()
    assert member.read_time(folder, lambda: 0.0).least_s >= RELEASED_S + DAY_S


def test_validity_of_a_certificate_without_times_is_refused():
    with pytest.raises(ValueError, match="without times"):
        read_validity(b"0\x82")


# TLS


def connect(server, pem, trusted_time, folder):
    member = Membership(enrolment=make_enrolment(authority=pem), key=None, folder=folder)
    return shake_hands(server, member.make_context(trusted_time))


@pytest.mark.parametrize("clock_s", BEHIND.values(), ids=BEHIND)
def test_clock_behind_shuts_no_device_out_and_revives_no_certificate(tmp_path, clock_s):
    server, pem = make_server(tmp_path)
    trusted_time = wrong_time(clock_s)
    assert connect(server, pem, trusted_time, tmp_path) is None
    trusted_time.note(time.time() + 2 * DAY_S)  # the certificate has ended since
    text = explain_failure(connect(server, pem, trusted_time, tmp_path), "fleet:8883").text
    assert "its certificate has expired: by what the fleet has signed it is 20" in text


def test_clock_of_last_months_shutdown_takes_a_newer_certificate_of_the_fleet(tmp_path):
    server, pem = make_server(tmp_path, begin=DAY, end=2 * DAY)
    assert connect(server, pem, TrustedTime(), tmp_path) is None


def test_clock_ahead_is_a_stated_refusal_until_it_is_right(tmp_path):
    server, pem = make_server(tmp_path)
    lie_s = 10 * YEAR_S
    trusted_time = TrustedTime(clock=lambda: time.time() + lie_s)
    text = explain_failure(connect(server, pem, trusted_time, tmp_path), "fleet:8883").text
    assert "has expired by this device's clock, which says 20" in text
    lie_s = 0.0
    assert connect(server, pem, trusted_time, tmp_path) is None


def test_end_of_a_certificate_counts_where_public_authorities_do(tmp_path):
    """OpenSSL would not look at the times of a CDN's certificate while the clock is behind."""
    server, pem = make_server(tmp_path)
    member = Membership(
        enrolment=make_enrolment(authority=pem, artifacts="https://cdn"), key=None, folder=tmp_path
    )
    trusted_time = wrong_time(0.0)
    assert shake_hands(server, member.make_download_context(trusted_time)) is None
    trusted_time.note(time.time() + 2 * DAY_S)
    assert "expired" in str(shake_hands(server, member.make_download_context(trusted_time)))


def test_server_of_another_authority_is_refused_whatever_the_clock_says(tmp_path):
    server, _ = make_server(tmp_path)
    (tmp_path / "other").mkdir()
    _, pem = make_server(tmp_path / "other")
    for trusted_time in (wrong_time(0.0), TrustedTime(), ahead()):
        assert "verify failed" in str(connect(server, pem, trusted_time, tmp_path))


# Enrolment and renewal, over the fleet's web server


@pytest.mark.parametrize("clock_s", BEHIND.values(), ids=BEHIND)
def test_device_with_a_clock_behind_enrols_and_renews(site, tmp_path, clock_s):  # noqa: F811
    config = tmp_path / "device"
    member = enrol(invite(site, "d1"), config, {}, trusted_time=wrong_time(clock_s))
    bound = wrong_time(clock_s, certificate=member.enrolment.certificate)
    assert abs(bound.least_s - max(RELEASED_S, time.time() - DAY_S)) < 600.0
    renewed = renew(config, trusted_time=bound).enrolment
    assert renewed.certificate != member.enrolment.certificate


def test_device_with_a_clock_ahead_says_so_and_enrols_with_the_same_code_once_it_is_right(site, tmp_path):  # noqa: F811
    code, config = invite(site, "d1"), tmp_path / "device"
    with pytest.raises(TransportError, match="has expired by this device's clock, which says 20"):
        enrol(code, config, {}, trusted_time=ahead())
    assert enrol(code, config, {}).enrolment.device == "d1"
    with pytest.raises(TransportError, match="has expired by this device's clock"):
        renew(config, trusted_time=ahead())
    assert renew(config).enrolment.device == "d1"


@pytest.mark.parametrize("clock", [0.0, 10 * YEAR_S], ids=["1970", "10 years ahead"])
def test_device_with_a_wrong_clock_and_no_network_waits(tmp_path, clock):
    with socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
    code = EnrolmentCode(address=f"127.0.0.1:{address[1]}", authority_sha256="0" * 64, secret="s" * 16)
    with pytest.raises(TransportError, match="is the fleet's server up"):
        enrol(code, tmp_path / "device", {}, trusted_time=wrong_time(clock))


# What people see


@pytest.fixture
def device(site, tmp_path, monkeypatch):  # noqa: F811
    """A device of a fleet whose document states a time that is far ahead of its clock."""
    config, state = tmp_path / "device", tmp_path / "state"
    enrol(invite(site, "d1"), config, {})
    Journal(state / "fleet" / "journal.json").write(JournalRecord(known_time_s=time.time() + 300 * DAY_S))
    monkeypatch.setenv("EDGEKIT_HOME", str(config))
    monkeypatch.setenv("EDGEKIT_STATE", str(state))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (config / "keys").mkdir(exist_ok=True)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("words", [["status"], ["fleet", "status"]])
def test_status_says_that_the_clock_is_wrong(words, capsys):
    assert main(words) == 0
    assert "the clock says 20" in (output := capsys.readouterr().out)
    assert "at least: set it (timedatectl set-ntp true)" in output
    assert main([*words, "--json"]) == 0
    assert "set-ntp" in json.loads(capsys.readouterr().out)["clock_fault"]
