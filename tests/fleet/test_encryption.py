"""Encrypted releases at the manager: who can read them, who gets keys, and what leads back to plain ones."""

import io
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from sqlalchemy import func, select
from tests.fleet.fleet_device import make_csr
from tests.fleet.new_fleet import copy_new_fleet
from tests.runtime.conftest import PackageMaker
from tests.runtime.conftest import maker as maker  # a fixture
from tests.runtime.encryption_parts import find_plaintext

from edgekit_fleet.identity import enrolment
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.manager.inbox import DeviceIndex
from edgekit_fleet.manager.publisher import Publisher
from edgekit_fleet.operations import devices, records, releases, rollouts
from edgekit_fleet.operations.releases import ReleaseSummary
from edgekit_fleet.operations.rollouts import StartRollout
from edgekit_fleet.rollouts.runner import RolloutRunner
from edgekit_fleet.store.due import mark_due
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.shards import Shards
from edgekit_fleet.store.tables import AuditRow, ContentKeyRow, DeviceRow, ExecutionRow, ReleasePackageRow
from edgekit_runtime.agent.artifacts.deltas import rebuild
from edgekit_runtime.agent.documents import (
    Desired,
    DesiredModel,
    EnrolmentRequest,
    RenewalRequest,
    Reported,
    ReportedModel,
)
from edgekit_runtime.agent.signing import key_id, unseal
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.encryption.container import (
    ContentKey,
    EncryptionError,
    decrypt_chunks,
    is_encrypted,
    read_header,
)
from edgekit_runtime.encryption.key_wrapping import encode_point, make_exchange, unwrap_key
from edgekit_runtime.errors import FleetError, SignatureError

TARGET = "x86-64"


class Device:
    """The keys of a device."""

    def __init__(self, name: str) -> None:
        self.name, self.key = name, Ed25519PrivateKey.generate()
        self.decryption_key = ec.generate_private_key(ec.SECP256R1())

    @property
    def pem(self) -> str:
        public = self.decryption_key.public_key()
        return public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()

    def request(self, secret: str, pem: str | None = None) -> EnrolmentRequest:
        key = self.pem if pem is None else pem
        return EnrolmentRequest(
            secret=secret, csr=make_csr(self.key), facts={"target": TARGET}, decryption_key=key
        )

    def unwrap(self, model: DesiredModel) -> ContentKey:
        point = encode_point(self.decryption_key.public_key())
        return unwrap_key(model.wrapped_key, model.key_id, make_exchange(self.decryption_key), point)


class World:
    """A fleet whose manager turns when it is told to."""

    def __init__(self, path: Path, maker: PackageMaker) -> None:
        self.path, self.maker = path, maker
        self.folder = copy_new_fleet(path / "fleet")
        self.folder.write_settings(FleetSettings())
        self.store = self.folder.open_store()
        self.authority = Authority(self.folder.identity)
        self.manager_key = Ed25519PrivateKey.generate()
        self.runner, self.now = RolloutRunner(), time.time()

    def make_code(self, name: str) -> str:
        with self.store.transaction() as session:
            return enrolment.make_code(session, name, actor="test")

    def enrol(self, device: Device, pem: str | None = None, *, secret: str = "") -> DeviceRow:
        secret = secret or self.make_code(device.name)
        with self.store.transaction() as session:
            return enrolment.enrol(session, self.authority, device.request(secret, pem), 86_400.0)[0]

    def release(self, version: str, **options: bool) -> ReleaseSummary:
        path = self.path / f"linear-{version}-{TARGET}.edgepkg"
        self.maker.write(path, version=version)
        return releases.make_release(
            self.folder, self.store, self.maker.trust, [path], actor="ann", name=f"v{version}", **options
        )

    def roll_out(self, version: str) -> str:
        request = StartRollout(release=f"v{version}", selector="all", waves="100%", soak_s=0.0)
        return rollouts.start_rollout(self.store, request, "ann")

    def turn(self) -> None:
        """Decide, and let each device succeed at once with what is wanted of it."""
        for _ in range(4):
            self.now += 2
            with self.store.transaction() as session:
                self.runner.turn(session, self.now)
                for row in session.scalars(select(ExecutionRow).where(ExecutionRow.state == "waiting")):
                    row.state, row.changed_at, row.ended_at = "succeeded", self.now, self.now
                    device = session.get_one(DeviceRow, row.device)
                    digest = self.maker.manifest(version=row.version).sha256
                    model = ReportedModel(
                        model=row.model, version=row.version, manifest_sha256=digest, health="healthy"
                    )
                    report = Reported(
                        device=row.device, sequence=1, status="converged", facts={}, models=(model,)
                    )
                    device.reported = to_plain(report)

    def publish(self) -> dict[str, Desired]:
        """Return the newest document of each device that gets one."""
        shards = Shards.of_all()
        publisher = Publisher(DeviceIndex(shards), shards, lambda: self.manager_key, 86_400.0)
        keys = {key_id(self.manager_key.public_key()): self.manager_key.public_key()}
        with self.store.transaction() as session:
            mark_due(session, session.scalars(select(DeviceRow.name)), content_sha256="")
            outgoing = publisher.make_due(session, self.now)
        return {item.device: unseal(item.envelope, "desired", Desired, keys, "") for item in outgoing}

    def read(self, version: str) -> tuple[ReleasePackageRow, ContentKey | None]:
        with self.store.snapshot() as session:
            row = session.get_one(ReleasePackageRow, (f"v{version}", "linear", TARGET))
            key = session.get(ContentKeyRow, row.key_id)
            session.expunge_all()
        return row, None if key is None else ContentKey(key.key_id, key.content_key)

    def find_file(self, path: str, sha256: str) -> Path:
        folder, _, name = path.rpartition("/")
        return self.folder.repository / "targets" / folder / f"{sha256}.{name}"

    def list_audit(self, action: str) -> list[AuditRow]:
        with self.store.snapshot() as session:
            rows = session.scalars(select(AuditRow).where(AuditRow.action == action)).all()
            session.expunge_all()
            return list(rows)


@pytest.fixture
def world(tmp_path: Path, maker: PackageMaker) -> Iterator[World]:
    made = World(tmp_path, maker)
    yield made
    made.store.close()


def test_repository_of_encrypted_releases_holds_no_byte_of_them(world: World) -> None:
    summaries = [world.release(version, encrypt=True) for version in ("1.0.0", "2.0.0")]
    assert all(summary.is_encrypted for summary in summaries)
    assert len(summaries[1].deltas) == 2  # a coded file, and one from 1.0.0
    plaintexts = [
        (world.path / f"linear-{version}-{TARGET}.edgepkg").read_bytes() for version in ("1.0.0", "2.0.0")
    ]
    for plaintext in plaintexts:
        assert find_plaintext(world.folder.repository / "targets", plaintext) == []
    row, key = world.read("2.0.0")
    assert key is not None
    package = world.find_file(row.path, row.sha256)
    assert b"".join(decrypt_chunks(package, key)) == plaintexts[1]
    for delta in row.deltas:
        file = world.find_file(delta["path"], delta["sha256"])
        content = io.BytesIO(b"".join(decrypt_chunks(file, key)))
        base = plaintexts[0] if delta["from_sha256"] else b""
        made = rebuild(content, base, len(plaintexts[1]), threading.Event())
        assert b"".join(made) == plaintexts[1]
    _, other = world.read("1.0.0")
    assert other is not None and other.secret != key.secret
    with pytest.raises(EncryptionError):
        list(decrypt_chunks(package, other))


def test_fleet_encrypts_by_default_where_its_settings_say_so(world: World) -> None:
    world.folder.write_settings(FleetSettings(encrypts=True))
    assert world.release("1.0.0").is_encrypted
    assert not world.release("2.0.0", allow_plain=True).is_encrypted


def test_same_package_is_released_again_under_a_new_key(world: World) -> None:
    world.release("1.0.0", encrypt=True)
    path = world.path / f"linear-1.0.0-{TARGET}.edgepkg"
    again = releases.make_release(
        world.folder, world.store, world.maker.trust, [path], actor="ann", name="again", encrypt=True
    )
    assert again.is_encrypted
    with world.store.snapshot() as session:
        assert session.scalar(select(func.count(ReleasePackageRow.path.distinct()))) == 2
        assert session.scalar(select(func.count(ContentKeyRow.content_key.distinct()))) == 2


@pytest.mark.parametrize("withdrawn", [False, True])
def test_package_that_was_released_plain_is_not_encrypted(world: World, withdrawn: bool) -> None:
    """Mirrors have it, and a device that runs it would keep the plain file: it sees the same version."""
    world.release("1.0.0")
    if withdrawn:
        releases.withdraw_release(world.folder, world.store, "v1.0.0", "ann")
    path = world.path / f"linear-1.0.0-{TARGET}.edgepkg"
    with pytest.raises(FleetError, match=r"linear 1\.0\.0 was released plain in 'v1\.0\.0'"):
        releases.make_release(
            world.folder, world.store, world.maker.trust, [path], actor="ann", name="again", encrypt=True
        )
    assert world.release("2.0.0", encrypt=True).is_encrypted


def test_document_holds_a_key_that_its_device_alone_can_unwrap(world: World) -> None:
    first, second = Device("d1"), Device("d2")
    for device in (first, second):
        world.enrol(device)
    world.release("1.0.0", encrypt=True)
    world.roll_out("1.0.0")
    world.turn()
    documents = world.publish()
    _, key = world.read("1.0.0")
    for device, stranger in ((first, second), (second, first)):
        (model,) = documents[device.name].models
        assert device.unwrap(model) == key
        with pytest.raises(EncryptionError, match="another device"):
            stranger.unwrap(model)


def test_revoked_device_gets_no_key_of_a_later_release(world: World) -> None:
    device, other = Device("d1"), Device("d2")
    world.enrol(device)
    world.enrol(other)
    world.release("1.0.0", encrypt=True)
    world.roll_out("1.0.0")
    world.turn()
    devices.revoke(world.store, "d1", "ann", "stolen")
    world.release("2.0.0", encrypt=True)
    world.roll_out("2.0.0")
    world.turn()
    documents = world.publish()
    assert documents.keys() == {"d2"}
    _, old = world.read("1.0.0")
    assert other.unwrap(documents["d2"].models[0]) not in (None, old)
    with world.store.transaction() as session, pytest.raises(SignatureError, match="revoked"):
        enrolment.renew(
            session, world.authority, RenewalRequest(device="d1", csr=make_csr(device.key)), 86_400.0
        )


def test_device_without_a_decryption_key_is_told_to_enrol_again(world: World) -> None:
    device = Device("d1")
    world.enrol(device, pem="")
    world.release("1.0.0", encrypt=True)
    with pytest.raises(FleetError, match="enrol it again to receive encrypted releases"):
        world.roll_out("1.0.0")
    with world.store.transaction() as session:
        session.get_one(DeviceRow, "d1").last_seen_at = world.now
    assert "enrol it again to receive encrypted releases" in devices.describe(world.store, "d1").why
    assert world.enrol(device).decryption_key == device.pem  # by a new code, without a revocation
    world.roll_out("1.0.0")
    world.turn()
    assert device.unwrap(world.publish()["d1"].models[0]) == world.read("1.0.0")[1]
    assert "encrypted" not in devices.describe(world.store, "d1").why


def test_copy_of_a_device_cannot_register_a_decryption_key_of_its_own(world: World) -> None:
    device = Device("d1")
    secret = world.make_code("d1")
    world.enrol(device, secret=secret)
    thief = Device("d1")
    thief.key = device.key  # of the copied card
    # The used code is taken as a renewal, which changes no key; there is no new one.
    assert world.enrol(thief, secret=secret).decryption_key == device.pem
    with world.store.transaction() as session:
        request = RenewalRequest(device="d1", csr=make_csr(thief.key))
        assert enrolment.renew(session, world.authority, request, 86_400.0)[0].decryption_key == device.pem
    with pytest.raises(Exception, match="revoke it first"):
        world.make_code("d1")


def test_used_code_adds_no_decryption_key_to_a_device_that_has_none(world: World) -> None:
    device = Device("d1")
    secret = world.make_code("d1")
    world.enrol(device, pem="", secret=secret)
    assert world.enrol(device, secret=secret).decryption_key == ""


@pytest.mark.parametrize(
    "pem", ["x", "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n", "point"]
)
def test_malformed_decryption_key_is_refused_at_the_enrolment(world: World, pem: str) -> None:
    device = Device("d1")
    if pem == "point":  # of no curve
        lines = device.pem.splitlines()
        pem = "\n".join([lines[0], lines[1], "A" * len(lines[2][:-4]) + lines[2][-4:], lines[3]])
    with pytest.raises(SignatureError, match="decryption key"):
        world.enrol(device, pem=pem)


def test_device_that_enrols_again_gets_keys_for_its_new_decryption_key(world: World) -> None:
    device = Device("d1")
    world.enrol(device)
    world.release("1.0.0", encrypt=True)
    world.roll_out("1.0.0")
    world.turn()
    old = world.publish()["d1"].models[0]
    devices.revoke(world.store, "d1", "ann", "new card")
    renewed = Device("d1")
    world.enrol(renewed)
    new = world.publish()["d1"].models[0]
    assert renewed.unwrap(new) == device.unwrap(old) == world.read("1.0.0")[1]
    with pytest.raises(EncryptionError):
        device.unwrap(new)
    assert len(world.list_audit("device.decryption-key")) == 2


def test_plain_release_after_an_encrypted_one_needs_permission(world: World) -> None:
    world.enrol(Device("d1"))
    world.release("1.0.0", encrypt=True)
    with pytest.raises(FleetError, match=r"released encrypted in 'v1\.0\.0'"):
        world.release("2.0.0", encrypt=False)
    offered = {path.name for path in (world.folder.repository / "targets").rglob("*2.0.0*")}
    assert offered == set()
    world.roll_out("1.0.0")
    world.turn()
    world.release("2.0.0", allow_plain=True)
    assert world.list_audit("release.make")[-1].detail["allows_plain"]
    row, _ = world.read("2.0.0")
    # A delta from the encrypted version would tell what that was.
    assert [delta["from_sha256"] for delta in row.deltas] == [""]
    world.roll_out("2.0.0")
    world.turn()
    (model,) = world.publish()["d1"].models
    assert (model.version, model.key_id, model.allows_plain) == ("2.0.0", "", True)


def test_plain_release_from_before_does_not_replace_an_encrypted_version(world: World) -> None:
    world.enrol(Device("d1"))
    world.release("2.0.0")  # never rolled out
    world.release("1.0.0", encrypt=True)
    world.roll_out("1.0.0")
    world.turn()
    with pytest.raises(FleetError, match=r"encrypted, and 2\.0\.0 is plain"):
        world.roll_out("2.0.0")


@pytest.mark.parametrize("allow_plain", [False, True])
def test_rollback_to_a_plain_version_needs_permission(world: World, allow_plain: bool) -> None:
    world.enrol(Device("d1"))
    world.release("1.0.0")
    world.roll_out("1.0.0")
    world.turn()
    world.release("2.0.0", encrypt=True)
    name = world.roll_out("2.0.0")
    world.turn()
    assert rollouts.find_rollout(world.store, name).state == "succeeded"
    if not allow_plain:
        with pytest.raises(FleetError, match="--allow-plain"):
            rollouts.give_order(world.store, name, "abort", "ann")
        return
    rollouts.give_order(world.store, name, "abort", "ann", allow_plain=True)
    assert "plain versions allowed" in rollouts.find_rollout(world.store, name).because
    world.turn()
    (model,) = world.publish()["d1"].models
    assert (model.version, model.is_return, model.allows_plain, model.key_id) == ("1.0.0", True, True, "")


def test_rollback_to_an_encrypted_version_brings_its_key(world: World) -> None:
    device = Device("d1")
    world.enrol(device)
    for version in ("1.0.0", "2.0.0"):
        world.release(version, encrypt=True)
        name = world.roll_out(version)
        world.turn()
    rollouts.give_order(world.store, name, "abort", "ann")
    world.turn()
    (model,) = world.publish()["d1"].models
    assert (model.version, model.is_return, model.allows_plain) == ("1.0.0", True, False)
    assert device.unwrap(model) == world.read("1.0.0")[1]


def test_backup_brings_content_keys_back(world: World) -> None:
    device = Device("d1")
    world.enrol(device)
    world.release("1.0.0", encrypt=True)
    world.roll_out("1.0.0")
    world.turn()
    _, key = world.read("1.0.0")
    records.back_up(world.folder, world.path / "backup")
    world.store.close()
    world.folder = FleetFolder(world.path / "restored")
    records.restore(world.folder, world.path / "backup", "")
    world.store = world.folder.open_store()
    assert device.unwrap(world.publish()["d1"].models[0]) == key


def test_encrypted_file_of_the_repository_names_its_key_and_nothing_else(world: World) -> None:
    world.release("1.0.0", encrypt=True)
    row, key = world.read("1.0.0")
    path = world.find_file(row.path, row.sha256)
    assert key is not None and is_encrypted(path)
    assert read_header(path).key_id == key.key_id and read_header(path).recipients == {}
