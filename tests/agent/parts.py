"""Documents and views of one model, for tests of decisions."""

import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from edgekit_runtime.agent.conditions import DeviceConditions, ModelView
from edgekit_runtime.agent.documents import Desired, DesiredModel, Enrolment
from edgekit_runtime.agent.manager_keys import FIELD

OLD, NEW = "a" * 64, "b" * 64
PACKAGE = "c" * 64
NOON = DeviceConditions(now_s=1_000_000.0, minute_of_day=720)
HERE = DeviceConditions(now_s=1_000_000.0, minute_of_day=720, downloaded=frozenset({PACKAGE}))


def want(**changes: Any) -> DesiredModel:
    stated: dict[str, Any] = {
        "model": "kws",
        "version": "2.0.0",
        "manifest_sha256": NEW,
        "path": "kws-2.0.0.edgepkg",
        "size_bytes": 1000,
        "sha256": PACKAGE,
        "execution": "e1",
        "release": "r",
        "rollout": "o",
    }
    return DesiredModel(**{**stated, **changes})


def make_desired(*models: DesiredModel, version: int = 1, **changes: Any) -> Desired:
    stated: dict[str, Any] = {"device": "d1", "issued_at": 0.0, "expires_at": 2e6, "epoch": 1}
    return Desired(**{**stated, "version": version, "models": models, **changes})


def make_root(manager: Ed25519PrivateKey) -> str:
    """Return a root, without signatures, that names the manager's key."""
    public = manager.public_key().public_bytes_raw().hex()
    key = {"keytype": "ed25519", "scheme": "ed25519", "keyval": {"public": public}}
    return json.dumps({"signed": {"version": 1, FIELD: {"k1": key}}, "signatures": []})


def make_enrolment(**changes: Any) -> Enrolment:
    stated: dict[str, Any] = {
        "device": "d1",
        "certificate": "",
        "authority": "",
        "brokers": ("fleet:8883",),
        "web": "https://fleet:8443",
        "artifacts": "https://fleet:8443/artifacts",
        "tuf_root": "",
        "package_keys": (),
        "target": "x86-64",
    }
    return Enrolment(**{**stated, **changes})


def view(**changes: Any) -> dict[str, ModelView]:
    stated: dict[str, Any] = {
        "model": "kws",
        "version": "1.0.0",
        "manifest_sha256": OLD,
        "health": "healthy",
        "served": ("1.0.0",),
    }
    return {"kws": ModelView(**{**stated, **changes})}
