"""Enrols simulated devices directly in the store, each with a key and a certificate of the authority."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from edgekit_fleet.broker.mosquitto import list_brokers
from edgekit_fleet.identity import enrolment
from edgekit_fleet.identity.authority import Authority
from edgekit_fleet.releases.manager_key import read_newest_root
from edgekit_fleet.simulation.simulated_device import FleetAccess, SimulatedMember
from edgekit_fleet.store.database import Store
from edgekit_fleet.store.fleet_folder import FleetFolder, FleetSettings
from edgekit_fleet.store.tables import ReleasePackageRow, ReleaseRow
from edgekit_runtime.agent.documents import EnrolmentRequest
from edgekit_runtime.agent.enrolment import make_csr
from edgekit_runtime.agent.manager_keys import read_named

_BATCH = 500


def read_access(
    folder: FleetFolder, settings: FleetSettings, brokers: tuple[tuple[str, int], ...] = ()
) -> FleetAccess:
    """Return the access data of a local fleet. By default the brokers come from `settings`."""

    def read() -> dict[str, Ed25519PublicKey]:
        return read_named(read_newest_root(folder.repository))

    return FleetAccess(
        brokers=brokers or list_brokers(settings),
        authority=Authority(folder.identity).certificate_path.read_text(),
        manager_keys=read(),
        read_manager_keys=read,
    )


def enrol_simulated(
    store: Store,
    authority: Authority,
    names: Sequence[str],
    folder: Path,
    *,
    target: str = "x86-64",
    tags: Mapping[str, str] | None = None,
) -> list[SimulatedMember]:
    """Enrol devices and return them. Write the certificate and key of each to `NAME.pem` in `folder`.

    Raises:
        ConfigError: A name is malformed or taken.
        OutputError: The store cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    members = []
    for begin in range(0, len(names), _BATCH):
        with store.transaction() as session:
            for name in names[begin : begin + _BATCH]:
                secret = enrolment.make_code(session, name, actor="simulation", target=target, tags=tags)
                key = Ed25519PrivateKey.generate()
                request = EnrolmentRequest(secret=secret, csr=make_csr(key), facts={"target": target})
                session.flush()
                _, certificate = enrolment.enrol(session, authority, request, 365 * 86_400.0)
                private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                path = folder / f"{name}.pem"
                path.write_bytes(certificate.pem.encode() + private)
                members.append(SimulatedMember(device=name, target=target, pem=path))
    return members


def add_simulated_release(store: Store, version: str, *, model: str, target: str, size_bytes: int) -> None:
    """Add a release to the store. There is no package file, because simulated devices download nothing."""
    with store.transaction() as session:
        session.add(ReleaseRow(name=version, created_at=time.time()))
        session.flush()
        session.add(
            ReleasePackageRow(
                release=version,
                model=model,
                target=target,
                version=version,
                manifest_sha256=version.rjust(64, "0"),
                path=f"{target}/{model}-{version}-{target}.edgepkg",
                size_bytes=size_bytes,
                sha256=version.rjust(64, "f"),
                needs={},
            )
        )
