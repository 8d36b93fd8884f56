"""Installs and removes edgekit on a device over ssh, and reads facts about the device."""

import hashlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from edgekit_hil.provisioning.device_facts import InstallFacts
from edgekit_hil.provisioning.ssh_host import SshHost
from edgekit_hil.provisioning.wheelhouse import Wheelhouse, pack
from edgekit_runtime.errors import ProvisioningError
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.keys import PUBLIC_KEY_SUFFIX

_PROBE_LIMIT_S: Final = 60.0
_UPLOAD_LIMIT_S: Final = 1800.0
_INSTALL_LIMIT_S: Final = 1800.0  # of a slow card
_PREFIX: Final = "/opt/edgekit"
_RECEIVE: Final = (  # flock exits with 75 if the lock is taken, and tar never does
    f"mkdir -p {_PREFIX} && cd {_PREFIX} && flock -n -E 75 lock"
    " sh -c 'rm -rf stage && mkdir -m 700 stage && tar -xf - -C stage' || { code=$?; [ $code != 75 ] ||"
    " echo 'another installation is running on this device; wait for it' >&2; exit $code; }"
)
_MB: Final = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallRequest:
    """The desired state of a device for `install`.

    Attributes:
        keys: The paths of public keys to trust, each named `NAME.pub.pem`.
        target: The target that packages must be made for, or empty for any target.
        code: The one-time code for joining a fleet, or empty.
    """

    engine: str = "ort"
    keys: Sequence[Path] = ()
    target: str = ""
    code: str = ""


@dataclass(frozen=True, slots=True)
class InstallReport:
    """The result of an installation.

    Attributes:
        facts: The facts about the device before the installation.
        release: The release that runs now.
        changed: The changes in order. It is empty if nothing had to change.
        notes: What was not done, and why.
    """

    facts: InstallFacts
    release: str
    changed: tuple[str, ...]
    notes: tuple[str, ...]


def probe(host: SshHost, *, has_models: bool = False) -> InstallFacts:
    """Read the facts about a device over ssh. Include its models if `has_models` is True.

    Raises:
        TransportError: The device cannot be reached.
        ProvisioningError: The device refuses the login, or its answer lacks required facts.
    """
    call = ("status", str(int(has_models)))
    facts = InstallFacts.parse(_run(host, "none", *call, limit_s=_PROBE_LIMIT_S))
    if facts.rights == "sudo":  # facts that only root may read; by sudo it reports the rights of root
        facts = InstallFacts.parse(_run(host, "sudo", *call, limit_s=_PROBE_LIMIT_S))
        facts = replace(facts, rights="sudo")
    return facts


def install(host: SshHost, request: InstallRequest, show: Callable[[str], None]) -> InstallReport:
    """Bring a device to the requested state, and change only what differs.

    Raises:
        TransportError: The device cannot be reached.
        ProvisioningError: The device cannot be set up. The previous release still runs.
        OutputError: The packages cannot be stored on this machine.
    """
    show("looking at the device")
    facts = probe(host)
    python = facts.choose_python()
    house = Wheelhouse.plan(facts, python, request.engine)
    new_keys = _find_new(request.keys, facts)
    content = []
    if facts.release != house.release:
        show("fetching packages for it")
        house.download()
        needed = house.measure()
        if facts.free_bytes < needed:
            raise ProvisioningError(
                f"the device has {facts.free_bytes / _MB:.0f} MB free, expected {needed / _MB:.0f} MB; free"
                " some space and run this again"
            )
        content = house.list_content()
    content += [(f"keys/{key.name}", key) for key in new_keys]
    if content:
        show("copying")
        receive = _RECEIVE if facts.rights == "root" else f"sudo -n sh -c {shlex.quote(_RECEIVE)}"
        host.run(receive, pack(content), _UPLOAD_LIMIT_S)
    show("installing")
    arguments = [
        house.release,
        python.path,
        find_engine(request.engine).installation.modules[0],
        str(int(python.has_tensorrt)),
    ]
    lines = _run(
        host,
        facts.rights,
        "install_release",
        *arguments,
        request.target,
        request.code,
        limit_s=_INSTALL_LIMIT_S,
    )
    return InstallReport(facts, house.release, _pick(lines, "changed"), _pick(lines, "note"))


def uninstall(host: SshHost, *, purge: bool) -> tuple[str, ...]:
    """Remove edgekit from a device, and return the names of the removed parts.

    If `purge`, also remove models, keys and the membership in a fleet.

    Raises:
        TransportError: The device cannot be reached.
        ProvisioningError: The user may not use sudo without a password, or the removal failed.
    """
    facts = probe(host)
    if facts.rights == "none":
        raise ProvisioningError("the user of the device may not use sudo without a password")
    lines = _run(host, facts.rights, "uninstall", str(int(purge)), limit_s=_PROBE_LIMIT_S)
    return _pick(lines, "changed")


def _find_new(keys: Sequence[Path], facts: InstallFacts) -> list[Path]:
    """Return the keys that the device does not trust yet.

    Raises:
        ProvisioningError: The device trusts another key with the same name.
    """
    new = []
    for key in keys:
        name = key.name.removesuffix(PUBLIC_KEY_SUFFIX)
        if name not in facts.keys:
            new.append(key)
        elif facts.keys[name] != hashlib.sha256(key.read_bytes()).hexdigest():
            raise ProvisioningError(
                f"the device trusts another key by the name {name!r}: /etc/edgekit/keys/{key.name}; rename"
                f" {key}, or remove that file on the device"
            )
    return new


def _run(host: SshHost, rights: str, *call: str, limit_s: float) -> list[str]:
    """Call a function of the script on the device, with arguments that its process list does not show."""
    shell = "sudo -n sh" if rights == "sudo" else "sh"
    return host.run(shell, [f"{read_script()}\n{shlex.join(call)} </dev/null\n".encode()], limit_s)


def read_script() -> str:
    """Return the shell script whose functions run on the device."""
    return (Path(__file__).parent / "on_device.sh").read_text()


def _pick(lines: Sequence[str], name: str) -> tuple[str, ...]:
    return tuple(line.removeprefix(f"{name}=") for line in lines if line.startswith(f"{name}="))
