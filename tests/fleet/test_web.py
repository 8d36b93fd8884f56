"""Enrolment, renewal and files over HTTPS, from devices and from others."""

import http.client
import json
import ssl
import time
from argparse import Namespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID
from sqlalchemy import event, select, update
from tests.fleet.fleet_device import FleetDevice, make_csr, post
from tests.fleet.new_fleet import copy_new_fleet
from tests.free_port import free_port
from tests.toolkit.cases import cases

from edgekit_fleet.access import failure_limit
from edgekit_fleet.identity.enrolment import list_revoked_serials
from edgekit_fleet.operations import devices, running
from edgekit_fleet.releases.manager_key import ManagerKey
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import AttributeRow, AuditRow, CodeRow, DeviceRow
from edgekit_fleet.web.server import serve_devices
from edgekit_runtime.agent.documents import EnrolmentCode, PackageKey
from edgekit_runtime.agent.enrolment import enrol, renew
from edgekit_runtime.agent.signing import key_id
from edgekit_runtime.commands.enroll import run
from edgekit_runtime.errors import ConfigError, OutputError, TransportError
from edgekit_runtime.system.atomic_files import Disk
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX


class Site:
    """Store and web server, without a broker."""

    def __init__(self, path, make_folder=copy_new_fleet):
        self.folder, self.settings = make_folder(path), FleetSettings(web_port=free_port())
        self.folder.write_settings(self.settings)
        self.authority = running.open_authority(self.folder, self.settings)
        self.repository = TufRepository(self.folder.repository, self.folder.repository_keys)
        if not self.repository.exists:
            self.repository.create(time.time())
        self.store = self.folder.open_store()
        self.pem = self.authority.certificate_path.read_text()

    def device(self, name, **options):
        parts = (self.store, self.settings, self.authority)
        (invitation,) = devices.invite(*parts, (name,), actor="test", **options)
        return FleetDevice(self.folder.path / name, invitation, self.pem)

    def post(self, path, body):
        return post(self.settings.web_address, self.pem, path, body)

    def get(self, path, **headers):
        context = ssl.create_default_context(cadata=self.pem)
        connection = http.client.HTTPSConnection("127.0.0.1", self.settings.web_port, context=context)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(), dict(answer.getheaders())
        finally:
            connection.close()


@pytest.fixture
def site(tmp_path):
    site = Site(tmp_path / "fleet")
    with serve_devices(site.store, site.folder, site.settings, site.authority):
        yield site
    site.store.close()


def test_code_lets_one_device_in_under_the_name_that_it_grants(site):
    device = site.device("d1", tags={"site": "lyon"})
    device.enrol()
    certificate = x509.load_pem_x509_certificate(device.enrolment.certificate.encode())
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert (name.value, device.name) == ("d1", "d1")
    assert certificate.public_key() == device.key.public_key()
    found = devices.describe(site.store, "d1")
    assert (found.summary.target, found.summary.tags) == ("x86-64", {"site": "lyon"})
    thief = Ed25519PrivateKey.generate()
    status, words = site.post("/enrol", {**device.request(), "csr": make_csr(thief)})
    assert status == 403
    assert b"used already" in words


@pytest.mark.parametrize("is_first_code", [True, False])
def test_enrolment_that_is_repeated_gives_a_certificate_and_changes_nothing_else(site, is_first_code):
    device, second = site.device("d1"), site.device("d1")
    device.enrol()
    devices.tag(site.store, "d1", {"quarantine": "yes"}, "test")
    with site.store.transaction() as session:
        session.execute(update(DeviceRow).values(status="faulty", because="NaN", sequence=7))
    before = read_device(site.store)
    device.code = device.code if is_first_code else second.code
    device.facts = {"target": "rpi5", "quarantine": "no"}
    device.enrol()
    after = read_device(site.store)
    assert after.pop("certificate_serial") != before.pop("certificate_serial")
    assert after.pop("certificate_expires_at") >= before.pop("certificate_expires_at")
    assert after == before


def read_device(store):
    with store.snapshot() as session:
        row = session.scalars(select(DeviceRow)).one()
        attributes = session.execute(select(AttributeRow.name, AttributeRow.value)).all()
    columns = {column.name: getattr(row, column.name) for column in DeviceRow.__table__.columns}
    return {**columns, "attributes": sorted(tuple(attribute) for attribute in attributes)}


def test_expired_and_invented_codes_are_refused(site):
    device = site.device("d1")
    with site.store.transaction() as session:
        session.execute(update(CodeRow).values(expires_at=1.0))
    assert site.post("/enrol", device.request())[0] == 403
    assert site.post("/enrol", {**device.request(), "secret": "0123456789abcdef"})[0] == 403


def test_code_that_was_made_before_a_revocation_lets_nobody_in(site):
    unused, device = site.device("d1"), site.device("d1").enrol()
    devices.revoke(site.store, device.name, "test", "stolen")
    status, words = site.post("/enrol", unused.request())
    assert (status, b"expired" in words) == (403, True)
    site.device("d1").enrol()


def test_secret_of_a_code_is_not_in_the_store(site):
    device = site.device("d1")
    with site.store.transaction() as session:
        (row,) = session.scalars(select(CodeRow)).all()
    assert device.code.secret not in (site.folder.path / "fleet.db").read_bytes().decode("latin-1")
    assert row.secret_sha256 != device.code.secret


def test_code_carries_all_that_a_device_needs_to_trust_the_fleet(site):
    status, data, _ = site.get("/authority")
    code = EnrolmentCode.parse(str(site.device("d1").code))
    assert status == 200
    assert x509.load_pem_x509_certificate(data) == site.authority.certificate
    assert code.authority_sha256 == site.authority.fingerprint


def test_request_for_another_kind_of_key_is_refused(site):
    device = site.device("d1")
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "edgekit-manager")])
    key = generate_private_key(SECP256R1())
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, SHA256())
    request = {**device.request(), "csr": csr.public_bytes(Encoding.PEM).decode()}
    status, words = site.post("/enrol", request)
    assert (status, b"Ed25519" in words) == (403, True)
    device.enrol()  # the code is not used up


def test_stranger_does_not_learn_where_a_store_is_that_cannot_be_reached(site, monkeypatch):
    def fail():
        raise OutputError("the store postgresql://edgekit@db.internal/fleet: connection refused")

    monkeypatch.setattr(site.store, "snapshot", fail)
    status, answer = site.post("/enrol", {"secret": "guess", "csr": "", "facts": {}})
    assert (status, b"db.internal" in answer) == (503, False)


def test_renewal_needs_the_key_of_the_device(site):
    device = site.device("d1").enrol()
    status, data = site.post("/renew", {"device": "d1", "csr": make_csr(device.key)})
    assert status == 200
    assert json.loads(data)["certificate"] != device.enrolment.certificate
    other = make_csr(Ed25519PrivateKey.generate())
    assert site.post("/renew", {"device": "d1", "csr": other})[0] == 403
    assert site.post("/renew", {"device": "d9", "csr": make_csr(device.key)})[0] == 403


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"{", 400), (b"[]", 403), (b'{"secret":1}', 403), (b"x" * 40_000, 413), (b"[" * 30_000, 400)],
)
def test_malformed_request_is_refused(site, body, status):
    assert site.post("/enrol", body)[0] == status


@pytest.fixture
def still_clock(monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


@pytest.mark.usefixtures("still_clock")
def test_many_failures_from_one_address_are_held_back(site):
    answers = [site.post("/enrol", b"{")[0] for _ in range(22)]
    assert answers == [400] * 20 + [429] * 2


@pytest.mark.usefixtures("still_clock")
def test_failures_of_others_at_an_address_keep_no_expected_device_out(site):
    device = site.device("d1")
    invented = {**device.request(), "secret": "guess"}
    assert [site.post("/enrol", invented)[0] for _ in range(21)] == [403] * 20 + [429]
    device.enrol()
    assert site.post("/renew", {"device": "d1", "csr": make_csr(device.key)})[0] == 200
    assert site.post("/renew", {"device": "d1", "csr": make_csr(Ed25519PrivateKey.generate())})[0] == 429


def test_failures_are_forgiven_one_each_3_s(site):
    with site.store.transaction() as session:
        assert all(failure_limit.take(session, {"a": 20}, 0.0) for _ in range(20))
        assert not failure_limit.take(session, {"a": 20}, 2.9)
        assert failure_limit.allows(session, {"b": 20}, 2.9)
        assert failure_limit.take(session, {"a": 20}, 3.1)
        assert not failure_limit.take(session, {"a": 20}, 5.9)
        assert sum(failure_limit.take(session, {"a": 20}, 66.1) for _ in range(30)) == 20


def test_redirect_to_the_host_that_a_request_names_is_never_sent(site):
    assert site.get("/authority/", Host="elsewhere.test")[0] == 404


def test_files_are_served_in_ranges_and_never_change(site):
    (site.folder.repository / "targets" / "x86-64").mkdir()
    (site.folder.repository / "targets" / "x86-64" / "1.eyes").write_bytes(b"0123456789")
    status, data, headers = site.get("/artifacts/targets/x86-64/1.eyes", Range="bytes=4-6")
    assert (status, data, headers["content-range"]) == (206, b"456", "bytes 4-6/10")
    assert "immutable" in headers["cache-control"]
    assert headers["etag"]
    assert site.get("/artifacts/targets/x86-64/1.eyes", Range="bytes=20-")[0] == 416


@pytest.mark.parametrize(
    "path", ["../identity/authority.pem", "%2e%2e/fleet.json", "..%2f..%2ffleet.json", ""]
)
def test_other_files_are_not_served(site, path):
    assert site.get(f"/artifacts/targets/{path}")[0] in (404, 400)


def test_taken_port_is_explained(site):
    with pytest.raises(TransportError, match="--web-port"):
        serve_devices(site.store, site.folder, site.settings, site.authority)


@cases("name", ["", "a/b", "+", "#", "edgekit-manager", "../x", "a" * 64, "ä", "a\n"])
def test_name_that_would_be_more_than_a_name_is_refused(site, name):
    with pytest.raises(ConfigError, match="cannot be named"):
        site.device(name)


def test_device_learns_which_package_keys_the_fleet_trusts(site, monkeypatch, tmp_path):
    monkeypatch.setattr("edgekit_fleet.web.app.find_keys_folder", lambda: tmp_path)
    (tmp_path / f"release{PUBLIC_KEY_SUFFIX}").write_text("a key")
    device = site.device("d1").enrol()
    assert device.enrolment.package_keys == (PackageKey(name="release", public_key="a key"),)


def invite(site, name):
    parts = (site.store, site.settings, site.authority)
    (invitation,) = devices.invite(*parts, (name,), actor="test", target="x86-64")
    return EnrolmentCode.parse(invitation.code)


def list_public_keys(config):
    return list((config / "keys").glob(f"*{PUBLIC_KEY_SUFFIX}"))


def test_renewal_changes_neither_package_keys_nor_whom_the_device_obeys(site, monkeypatch, tmp_path):
    served, config = tmp_path / "served", tmp_path / "device"
    monkeypatch.setattr("edgekit_fleet.web.app.find_keys_folder", lambda: served)
    served.mkdir()
    (served / f"vendor{PUBLIC_KEY_SUFFIX}").write_text("the vendor's")
    first = site.repository.read_root(1).decode()
    assert enrol(invite(site, "d1"), config, {}).enrolment.tuf_root == first
    (served / f"vendor{PUBLIC_KEY_SUFFIX}").write_text("a thief's")
    (served / f"second{PUBLIC_KEY_SUFFIX}").write_text("a thief's")
    site.repository.rotate(time.time(), roles=["manager", "root"])
    renewed = renew(config).enrolment
    assert [path.read_text() for path in list_public_keys(config)] == ["the vendor's"]
    assert renewed.package_keys == (PackageKey(name="vendor", public_key="the vendor's"),)
    assert renewed.tuf_root == first
    (config / "keys" / f"vendor{PUBLIC_KEY_SUFFIX}").unlink()  # trusted no longer, by hand
    renew(config)
    assert list(list_public_keys(config)) == []


@pytest.mark.parametrize("is_same", [True, False])
def test_device_that_moves_to_another_fleet_trusts_keys_of_the_old_one_no_more(
    site, is_same, monkeypatch, tmp_path
):
    served, config = tmp_path / "served", tmp_path / "device"
    monkeypatch.setattr("edgekit_fleet.web.app.find_keys_folder", lambda: served)
    keys = config / "keys"

    def write(folder, **some):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in some.items():
            (folder / f"{name}{PUBLIC_KEY_SUFFIX}").write_text(text)

    def trusted():
        return {path.name.partition(".")[0]: path.read_text() for path in keys.glob("*.pub.pem")}

    write(served, vendor="the vendor's", changed="of the fleet", signs="of the fleet", both="of the fleet")
    enrol(invite(site, "d1"), config, {})
    write(keys, hand="by hand", changed="by hand")
    (keys / "signs.pem").touch()
    (served / f"vendor{PUBLIC_KEY_SUFFIX}").unlink()
    if is_same:
        devices.revoke(site.store, "d1", "test", "enrolled again")
        enrol(invite(site, "d1"), config, {})
        assert "vendor" in trusted()
        return
    for name in ("changed", "signs"):
        (served / f"{name}{PUBLIC_KEY_SUFFIX}").unlink()
    other = Site(tmp_path / "other", FleetFolder)
    with serve_devices(other.store, other.folder, other.settings, other.authority):
        monkeypatch.setenv("EDGEKIT_HOME", str(config))
        done = run(Namespace(code=str(invite(other, "d1"))))
    other.store.close()
    assert "  trusted no more, a key of the fleet before: vendor.pub.pem" in done.lines
    found = {"both": "of the fleet", "changed": "by hand", "hand": "by hand", "signs": "of the fleet"}
    assert trusted() == found


def test_move_to_another_fleet_that_is_cut_off_leaves_the_old_trust(site, monkeypatch, tmp_path):
    class FullDisk(Disk):
        def create(self, path, mode):
            if "device.crt" in path.name:
                raise OSError(28, "No space left on device")
            return super().create(path, mode)

    served, config = tmp_path / "served", tmp_path / "device"
    monkeypatch.setattr("edgekit_fleet.web.app.find_keys_folder", lambda: served)
    served.mkdir()
    (served / f"old{PUBLIC_KEY_SUFFIX}").write_text("of the old fleet")
    enrol(invite(site, "d1"), config, {})
    (served / f"old{PUBLIC_KEY_SUFFIX}").rename(served / f"new{PUBLIC_KEY_SUFFIX}")
    other = Site(tmp_path / "other", FleetFolder)
    with serve_devices(other.store, other.folder, other.settings, other.authority):
        code = invite(other, "d1")
        with pytest.raises(OutputError):
            enrol(code, config, {}, FullDisk())
        assert (config / "keys" / f"old{PUBLIC_KEY_SUFFIX}").exists()
        enrol(code, config, {})
    other.store.close()
    assert [path.name for path in list_public_keys(config)] == [f"new{PUBLIC_KEY_SUFFIX}"]


def test_device_that_enrols_after_an_exchange_obeys_the_new_key_alone(site):
    before = site.device("d1").enrol().manager
    site.repository.rotate(time.time(), roles=["manager"])
    after = site.device("d2").enrol().manager
    assert before.keys().isdisjoint(after)
    assert after.keys() == {key_id(ManagerKey(site.folder).read().public_key())}


def test_renewal_brings_the_package_keys_that_the_fleet_lacked_at_the_enrolment(site, monkeypatch, tmp_path):
    served, config = tmp_path / "served", tmp_path / "device"
    monkeypatch.setattr("edgekit_fleet.web.app.find_keys_folder", lambda: served)
    enrol(invite(site, "d1"), config, {})
    served.mkdir()
    (served / f"vendor{PUBLIC_KEY_SUFFIX}").write_text("the vendor's")
    assert renew(config).enrolment.package_keys == (PackageKey(name="vendor", public_key="the vendor's"),)
    assert (config / "keys" / f"vendor{PUBLIC_KEY_SUFFIX}").read_text() == "the vendor's"


def test_list_of_revoked_certificates_reads_nothing_of_other_devices(site):
    def serial():
        return devices.describe(site.store, "d1").certificate_serial

    first = site.device("d1").enrol()
    revoked = [serial()]
    site.post("/renew", {"device": "d1", "csr": make_csr(first.key)})
    revoked.append(serial())
    devices.revoke(site.store, "d1", "test", "stolen")
    site.device("d1").enrol()
    site.device("d2").enrol()
    read = []

    def note(row, _context):
        read.append(row.subject)

    event.listen(AuditRow, "load", note)
    try:
        with site.store.snapshot() as session:
            assert list_revoked_serials(session) == revoked
    finally:
        event.remove(AuditRow, "load", note)
    assert set(read) == {"d1"}


@pytest.mark.usefixtures("still_clock")
def test_device_that_renews_again_and_again_is_held_back_and_others_are_not(site):
    device, other = site.device("d1").enrol(), site.device("d2").enrol()
    renewal = {"device": "d1", "csr": make_csr(device.key)}
    answers = [site.post("/renew", renewal)[0] for _ in range(21)]
    assert answers == [200] * 19 + [429] * 2  # the enrolment counts too
    assert site.post("/renew", {"device": "d2", "csr": make_csr(other.key)})[0] == 200
    with site.store.snapshot() as session:
        entries = session.scalars(select(AuditRow.action).where(AuditRow.subject == "d1")).all()
    assert entries.count("device.renew") == 19
