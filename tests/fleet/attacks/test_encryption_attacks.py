"""Attacks on encrypted releases: on the mirror, with keys of others, and back to what is not encrypted."""

import errno
import io
import os
from dataclasses import replace

import pytest
from tests.fleet.attacks.attack_site import TARGET, only, site  # noqa: F401  # a fixture
from tests.runtime.conftest import maker  # noqa: F401  # a fixture
from tests.runtime.encryption_parts import find_plaintext, make_device, make_heavy

from edgekit_fleet.releases.deltas import make_delta
from edgekit_fleet.releases.repository import NewTarget
from edgekit_runtime.agent.documents import DeltaOffer
from edgekit_runtime.encryption import key_wrapping
from edgekit_runtime.encryption.container import (
    encrypt,
    encrypt_file,
    is_encrypted,
    make_content_key,
    make_header,
)


class EncryptedOffers:
    """Offers encrypted packages to the device of a site.

    Attributes:
        secret: weights of each of them.
    """

    def __init__(self, attacked, home):
        self.site, self.device = attacked, make_device(home)
        self.stranger = make_device(home / "stranger")
        attacked.maker, self.secret = make_heavy(attacked.maker)

    def offer(self, version, *, public_key=None, base=None):
        """Publish an encrypted package; returns what a document asks for.

        Args:
            version: version of the package.
            public_key: of the device for which the key is wrapped; by default of this one.
            base: version to make a delta from.
        """
        key, folder = make_content_key(), self.site.folder
        plain, path = (folder / f"{kind}-{version}.edgepkg" for kind in ("plain", "encrypted"))
        self.site.maker.write(plain, version=version)
        header = encrypt_file(plain, path, key)
        name = f"linear-{version}-{TARGET}.edgepkg"
        custom = {"header": header.to_json()}
        targets = [NewTarget(device_class=TARGET, name=name, source=path, custom=custom)]
        old = (folder / f"plain-{base}.edgepkg").read_bytes() if base else b""
        suffix, content = make_delta(old, plain.read_bytes()) or ("", b"")
        if suffix:
            delta = folder / f"delta-{version}{suffix}"
            with delta.open("wb") as sink:
                encrypt(io.BytesIO(content), sink, key, make_header(key, len(content)))
            targets.append(NewTarget(device_class=TARGET, name=delta.name, source=delta))
        published = self.site.repository.publish(targets, self.site.clock.time())[1:]
        return replace(
            self.site.describe(version, path),
            key_id=key.key_id,
            wrapped_key=key_wrapping.wrap_key(key, public_key or self.device.public_key),
            deltas=tuple(
                DeltaOffer(
                    from_sha256=self.site.maker.manifest(version=base).sha256 if base else "",
                    path=file.path,
                    size_bytes=file.size_bytes,
                    sha256=file.sha256,
                )
                for file in published
            ),
        )

    def order(self, wanted):
        self.site.broker.deliver(self.site.order(wanted))

    def install(self, wanted):
        self.order(wanted)
        self.site.run_until(lambda: self.site.execution == ("succeeded", ""))

    def list_packages(self):
        return sorted((self.site.folder / "slots" / "models" / "linear").glob("*.edgepkg"))


@pytest.fixture
def offers(site, monkeypatch, tmp_path):  # noqa: F811
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    return EncryptedOffers(site, tmp_path)


def test_encrypted_version_is_updated_by_a_delta(offers, site):  # noqa: F811
    offers.install(offers.offer("2.0.0"))
    site.mirror.requests.clear()
    offers.install(offers.offer("3.0.0", base="2.0.0"))
    assert site.attacks("delta") == []
    assert not [path for path in site.mirror.requests if path.endswith(".edgepkg")]
    assert is_encrypted(offers.list_packages()[-1]) and site.running() == "3.0.0"
    assert find_plaintext(site.folder / "slots", offers.secret) == []
    assert find_plaintext(site.folder / "agent", offers.secret) == []


def test_first_encrypted_version_comes_as_a_coded_file(offers, site, maker):  # noqa: F811
    site.maker = maker  # whose package packs well
    offers.install(offers.offer("2.0.0"))
    assert site.attacks("delta") == [] and site.running() == "2.0.0"
    assert [path for path in site.mirror.requests if path.endswith(".ekdelta")]
    assert is_encrypted(offers.list_packages()[-1])


def test_damaged_delta_of_an_encrypted_version_costs_only_its_own(offers, site):  # noqa: F811
    offers.install(offers.offer("2.0.0"))
    wanted = offers.offer("3.0.0", base="2.0.0")
    (delta,) = wanted.deltas
    site.mirror.change = only(delta.path.rpartition("/")[2], bytes(delta.size_bytes))
    offers.order(wanted)
    site.run_until(lambda: site.attacks("delta"), 700.0)
    site.run_until(lambda: site.execution == ("succeeded", ""), 700.0)
    assert site.running() == "3.0.0"


def test_delta_waits_while_memory_is_short(offers, site, monkeypatch):  # noqa: F811
    offers.install(offers.offer("2.0.0"))

    def refuse(*_):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patches:
        patches.setattr(os, "memfd_create", refuse)
        offers.order(offers.offer("3.0.0", base="2.0.0"))
        site.run_until(lambda: site.execution == ("downloading", "unavailable"))
    site.run_until(lambda: site.execution == ("succeeded", ""), 700.0)
    assert site.running() == "3.0.0" and site.attacks() == []


def test_mirror_that_serves_plaintext_is_refused(offers, site):  # noqa: F811
    wanted = replace(offers.offer("2.0.0"), deltas=())
    plain = (site.folder / "plain-2.0.0.edgepkg").read_bytes()
    site.mirror.change = only(".edgepkg", plain.ljust(wanted.size_bytes))
    offers.order(wanted)
    site.run_until(lambda: any(wanted.sha256[:12] in text for text in site.attacks()))
    assert site.execution == ("downloading", "digest")
    site.check_unharmed()


def test_document_with_the_wrapped_key_of_another_device_is_refused(offers, site):  # noqa: F811
    offers.order(offers.offer("2.0.0", public_key=offers.stranger.public_key))
    site.run_until(lambda: site.execution == ("refused", "no-key"))
    assert "another device" in site.reported["executions"][-1]["reason"]
    site.check_unharmed()


def test_document_without_a_key_says_to_enrol_again(offers, site):  # noqa: F811
    offers.order(replace(offers.offer("2.0.0"), wrapped_key=""))
    site.run_until(lambda: site.execution == ("refused", "no-key"))
    assert "enrol it again" in site.reported["executions"][-1]["reason"]
    site.check_unharmed()


def test_rollback_to_a_plain_version_needs_a_document_that_says_so(offers, site):  # noqa: F811
    offers.install(offers.offer("2.0.0"))
    plain = site.publish("3.0.0")
    offers.order(plain)
    site.run_until(lambda: site.execution == ("failed", "slots"))
    assert "is not encrypted" in site.reported["executions"][-1]["reason"]
    assert site.running() == "2.0.0"
    offers.install(replace(plain, allows_plain=True))
    assert site.running() == "3.0.0"


@pytest.mark.parametrize("key_id", ["", "0" * 32])
def test_file_with_another_key_than_the_document_says_is_refused(offers, site, key_id):  # noqa: F811
    wanted = offers.offer("2.0.0")
    other = make_content_key()
    wrapped_key = key_wrapping.wrap_key(
        replace(other, key_id=key_id or other.key_id), offers.device.public_key
    )
    offers.order(replace(wanted, key_id=key_id, wrapped_key=wrapped_key, deltas=()))
    site.run_until(lambda: site.execution == ("failed", "slots"))
    assert "encrypted with key" in site.reported["executions"][-1]["reason"]
    site.check_unharmed()


def test_slots_of_a_copied_device_open_nothing_elsewhere(offers, site, monkeypatch, tmp_path):  # noqa: F811
    offers.install(offers.offer("2.0.0"))
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path / "stranger"))
    assert site.running() == "1.0.0"  # which is plain
