"""What a device does with its slots: cases that are interrupted at every step, and what may start then."""

import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from edgekit_runtime.canonical_json import encode_json
from edgekit_runtime.errors import SlotError
from edgekit_runtime.slots import HEALTHY, MAX_BEGUN, Permissions, Slots
from edgekit_runtime.trust.trust_store import TrustStore

MODEL = "linear"
VERSIONS = ("0.9.0", "1.0.0", "2.0.0", "3.0.0")
FACTORY = "0.9.0"


@dataclass(frozen=True)
class Bench:
    """Slots on a disk, and packages to install.

    Attributes:
        slots: under test.
        packages: folder with one package a version.
    """

    slots: Slots
    packages: Path

    def install(self, version: str, *, factory: bool = False, retry: bool = False) -> None:
        path = self.packages / f"{version}.edgepkg"
        self.slots.install(path, Permissions(retry=retry), factory=factory)

    def begin(self) -> None:
        self.slots.begin_start(MODEL).package.close()

    def prove(self, version: str) -> None:
        self.install(version)
        self.begin()
        self.slots.confirm(MODEL, version)

    def reject(self, version: str) -> None:
        choice = self.slots.reject(MODEL, version, "failed its self-test")
        assert choice is not None
        choice.package.close()


@dataclass(frozen=True)
class Case:
    """One thing that a device does.

    Attributes:
        prepare: what was done before, undisturbed.
        act: what is interrupted.
        during: versions of which one must start after an interruption; None among them where nothing was
            installed before.
        after: versions of which one must start once `act` has returned, whatever happens then.
    """

    prepare: Callable[[Bench], None]
    act: Callable[[Bench], object]
    during: frozenset[str | None]
    after: frozenset[str]


def _nothing(_: Bench) -> None: ...


def _factory(bench: Bench) -> None:
    bench.install(FACTORY, factory=True)


def _one(bench: Bench) -> None:
    bench.prove("1.0.0")


def _one_and_factory(bench: Bench) -> None:
    _factory(bench)
    _one(bench)


def _two(bench: Bench) -> None:
    _one(bench)
    bench.prove("2.0.0")


def _two_installed(bench: Bench) -> None:
    _one_and_factory(bench)
    bench.install("2.0.0")


def _two_on_trial(bench: Bench) -> None:
    _two_installed(bench)
    bench.begin()


def _two_begun_too_often(bench: Bench) -> None:
    _two_on_trial(bench)
    for _ in range(MAX_BEGUN - 1):
        bench.begin()


def _one_damaged(bench: Bench) -> None:
    _one_and_factory(bench)
    next((bench.slots.folder / "models" / MODEL).glob("slot-*")).write_bytes(b"damaged")


def _state_damaged(bench: Bench) -> None:
    _two(bench)
    _factory(bench)
    (bench.slots.folder / "models" / MODEL / "state.json").write_bytes(b"{}")


def _two_rejected(bench: Bench) -> None:
    _two_on_trial(bench)
    bench.reject("2.0.0")


def _update_and_regret(bench: Bench) -> None:
    bench.install("2.0.0")
    bench.begin()
    bench.slots.confirm(MODEL, "2.0.0")
    bench.install("3.0.0")
    bench.begin()
    bench.reject("3.0.0")
    bench.slots.rollback(MODEL)


def _case(
    prepare: Callable[[Bench], None], act: Callable[[Bench], object], during: str, after: str | None = None
) -> Case:
    """Return a case; versions are given by their first digit, `-` stands for none."""
    names = {version[0]: version for version in VERSIONS}
    allowed = frozenset(names.get(digit) for digit in during)
    return Case(prepare, act, allowed, frozenset(names[digit] for digit in after or during if digit != "-"))


CASES = {
    "first install": _case(_nothing, lambda b: b.install("1.0.0"), "-1", "1"),
    "first factory": _case(_nothing, _factory, "-0", "0"),
    "install over factory": _case(_factory, lambda b: b.install("1.0.0"), "01", "1"),
    "factory beside active": _case(_one, _factory, "1"),
    "install over active": _case(_one, lambda b: b.install("2.0.0"), "12", "2"),
    "install over two": _case(_two, lambda b: b.install("3.0.0"), "23", "3"),
    "install over trial": _case(_two_on_trial, lambda b: b.install("3.0.0"), "23", "3"),
    "install again": _case(_two_rejected, lambda b: b.install("2.0.0", retry=True), "12", "2"),
    "install mends": _case(_one_damaged, lambda b: b.install("1.0.0"), "01", "1"),
    "install and pin": _case(
        _one,
        lambda b: b.slots.install(b.packages / "2.0.0.edgepkg", Permissions(pin=True)),
        "12",
        "2",
    ),
    "begin on trial": _case(_two_installed, Bench.begin, "2"),
    "begin too often": _case(_two_begun_too_often, Bench.begin, "1"),
    "begin with damaged state": _case(_state_damaged, Bench.begin, "012"),
    "confirm": _case(_two_on_trial, lambda b: b.slots.confirm(MODEL, "2.0.0"), "2"),
    "reject": _case(_two_on_trial, lambda b: b.reject("2.0.0"), "12", "1"),
    "rollback": _case(_two, lambda b: b.slots.rollback(MODEL), "12", "1"),
    "rollback to factory": _case(_one_and_factory, lambda b: b.slots.rollback(MODEL), "01", "0"),
    "pin": _case(_two, lambda b: b.slots.pin(MODEL, True), "2"),
    "update and regret": _case(_one_and_factory, _update_and_regret, "0123", "0"),
}


def make_bench(folder: Path, packages: Path, trust: TrustStore) -> Bench:
    return Bench(Slots(folder, trust), packages)


def copy_folder(source: Path, target: Path) -> None:
    """Make `target` a copy of `source`, which may be missing."""
    shutil.rmtree(target, ignore_errors=True)
    if source.exists():
        shutil.copytree(source, target)


def start_fresh(folder: Path, trust: TrustStore) -> str | None:
    """Return the version that a new process starts, after it has read all of it; None where there is none.

    Raises:
        SlotError: something is installed and nothing can be started.
    """
    slots = Slots(folder, trust)
    if MODEL not in slots.models():
        return None
    try:
        choice = slots.begin_start(MODEL)
    except SlotError as error:
        if "nothing is installed" in str(error):
            return None
        raise
    with choice.package as package:
        contents = [bytes(package.read(artifact.path)) for artifact in package.manifest.artifacts]
        assert (package.manifest.version, all(contents)) == (choice.version, True)
    return choice.version


def find_proven(folder: Path, trust: TrustStore) -> set[str]:
    """Return the versions that were confirmed, which may start where no start can be counted."""
    if not folder.exists():
        return set()
    state = Slots(folder, trust).load(MODEL).state
    return {item.version for item in state.installed if item.health == HEALTHY}


def find_leftovers(folder: Path, trust: TrustStore) -> set[str]:
    """Return the names in the folder of the model that its state does not account for."""
    state = Slots(folder, trust).load(MODEL).state
    kept = {f"slot-{item.version}-{item.sha256[:16]}.edgepkg" for item in (state.active, state.spare) if item}
    if state.factory is not None:
        kept.add(f"factory-{state.factory.version}-{state.factory.sha256[:16]}.edgepkg")
    there = {path.name.removesuffix(".key") for path in (folder / "models" / MODEL).iterdir()}
    return there - kept - {"state.json"}


def rewrite_state(path: Path, body: dict[str, Any]) -> None:
    """Write a state with the digest that it must have."""
    body.pop("sha256", None)
    path.write_bytes(encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()}))


def write_keys(folder: Path) -> Path:
    """Make a folder with the key that signed the packages of the tests, for another process."""
    folder.mkdir()
    public = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32).public_key()
    pem = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (folder / "vendor.pub.pem").write_bytes(pem)
    return folder
