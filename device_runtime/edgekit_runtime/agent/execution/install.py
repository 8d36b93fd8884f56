"""The agent's operations on the models of this device: install, load, unload, remove, inspect.

Each operation can be repeated if it was interrupted at any point, because the slots switch atomically and the
service opens the version that the slots name.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal

from edgekit_runtime.agent.conditions import ModelView
from edgekit_runtime.agent.documents import DesiredModel
from edgekit_runtime.client.control import is_listening, load_installed, read_index, unload_model
from edgekit_runtime.errors import BackendError, SlotError
from edgekit_runtime.records import dataclass
from edgekit_runtime.slots import REJECTED, Permissions, Slots
from edgekit_runtime.system.atomic_files import read_stamp
from edgekit_runtime.system.child_process import ChildProcess
from edgekit_runtime.system.paths import find_running_service

_SELF_TEST_S: Final = 180.0
_TRIALS: Final = ("canary with", "shadow with")  # how the service's index describes a trial

ServiceIndex = dict[str, list[dict[str, str]]]


def self_test_in_child(path: Path) -> None:
    """Run the self-test of the package at `path` in a separate process.

    Raises:
        BackendError: the self-test failed, or did not end within 3 minutes.
    """
    request = json.dumps({"package": str(path)})
    with ChildProcess("edgekit_runtime.sessions.opening.selftest_child", request) as child:
        exit_code = child.wait(_SELF_TEST_S)
        if exit_code is None:
            raise BackendError(f"{path.name}: its self-test did not end within {_SELF_TEST_S:.0f} s")
        if exit_code != 0:
            raise BackendError(f"{path.name}: self-test: {child.explain_end()}")


@dataclass(frozen=True, slots=True)
class Installer:
    """The models of this device.

    Attributes:
        socket_path: socket of the service, or None to look for a running service.
        self_test: function that tests a package if no service runs.
    """

    slots: Slots
    socket_path: Path | None = None
    self_test: Callable[[Path], None] = self_test_in_child

    def install(self, path: Path, desired_model: DesiredModel) -> None:
        """Make the package at `path` the active version of its model. Store its content key if it has one.

        If no service runs that could test the package, a separate process tests it.

        Raises:
            PackageError: the package is damaged, signed by an unknown key, or encrypted for other devices.
            SlotError: the slots refuse or cannot write the package, or it differs from `desired_model`.
            OutputError: the content key cannot be written.
            BackendError: no engine on this device runs the package, or its self-test failed.
        """
        from edgekit_runtime.sessions.backends import check_engines

        self._prepare_key(path, desired_model)
        socket_path = self.find_service()
        if socket_path is None or not is_listening(socket_path):
            self.self_test(path)
        allowed = Permissions(
            downgrade=desired_model.is_return,
            retry=desired_model.is_return,
            plain=desired_model.allows_plain,
        )

        def check(manifest: object) -> None:
            check_engines(manifest)  # type: ignore[arg-type]  # a Manifest
            identity = getattr(manifest, "name", ""), getattr(manifest, "sha256", "")
            if identity != (desired_model.model, desired_model.manifest_sha256):
                raise SlotError(
                    f"the package is {identity[0]} with manifest {identity[1][:12]}, desired is"
                    f" {desired_model.model} with {desired_model.manifest_sha256[:12]}"
                )

        # A restart of the service must not end a trial: the slots remember it.
        trial = _choose_trial(desired_model)
        self.slots.install(path, allowed, check=check, trial="" if trial == "swap" else trial)

    def _prepare_key(self, path: Path, desired_model: DesiredModel) -> None:
        """Check how the package is encrypted, and write its key beside it; the slots take both."""
        from edgekit_runtime.encryption.container import is_encrypted, read_header

        key_id = read_header(path).key_id if is_encrypted(path) else ""
        if key_id != desired_model.key_id:
            raise SlotError(
                f"the package is {_describe_key(key_id)}, desired is {_describe_key(desired_model.key_id)}"
            )
        if key_id:
            from edgekit_runtime.encryption.opening import write_key_file

            write_key_file(path, key_id, desired_model.wrapped_key, self.slots.disk)

    def load(self, desired_model: DesiredModel) -> None:
        """Make the service load the active version, if a service runs.

        `desired_model.trial` states whether the service first tries the new version beside the old one. With
        the order `old-first`, the service unloads the old version first.

        Raises:
            SlotError: the service refused, or did not answer.
        """
        socket_path = self.find_service()
        if socket_path is None:
            return
        if desired_model.order == "old-first":
            self.unload(desired_model.model)
        load_installed(socket_path, desired_model.model, _choose_trial(desired_model))

    def unload(self, model: str) -> None:
        """Make the service stop serving a model, if the service serves it.

        Raises:
            SlotError: the service refused, or did not answer.
        """
        socket_path = self.find_service()
        index = None if socket_path is None else read_index(socket_path)
        if socket_path is not None and any(line["version"] for line in (index or {}).get(model, ())):
            unload_model(socket_path, model)

    def remove(self, model: str) -> None:
        """Make the service unload a model, and remove all its versions from the device.

        Raises:
            SlotError: the service refused or did not answer, or the model cannot be removed.
        """
        self.unload(model)
        self.slots.remove(model)

    def read_service(self) -> tuple[bool, ServiceIndex | None]:
        """Return whether a service is listening, and its index.

        The index is a dict from model to a list with the `version`, `state` and `reason` of each version. It
        is None if the service does not answer.
        """
        socket_path = self.find_service()
        if socket_path is None or not is_listening(socket_path):
            return False, None
        return True, read_index(socket_path)

    def fingerprint(self) -> Mapping[str, tuple[int, ...]]:
        """Return a dict from model to a value that changes when the stored state of the model changes."""
        models = self.slots.folder / "models"
        try:
            return {folder.name: read_stamp(folder / "state.json") for folder in models.iterdir()}
        except OSError:
            return {}

    def view(self, model: str) -> ModelView:
        """Return the state of a model in the slots, without the fields that come from the service.

        Raises:
            SlotError: there is no such model.
        """
        state = self.slots.load(model).state
        current, spare = state.current, state.spare
        return ModelView(
            model=model,
            version="" if current is None else current.version,
            manifest_sha256="" if current is None else current.sha256,
            health="missing" if current is None else _HEALTHS[current.health],
            previous="" if spare is None or spare.health == REJECTED else spare.version,
            pinned=state.pinned,
            rejected=tuple((rejection.sha256, rejection.reason) for rejection in state.rejected),
        )

    def list_installed(self, model: str) -> frozenset[str]:
        """Return the digests of the manifests of a model's installed packages, empty for an unknown model."""
        if model not in self.slots.models():
            return frozenset()
        return frozenset(installed.sha256 for installed in self.slots.load(model).state.installed)

    def find_service(self) -> Path | None:
        return self.socket_path or find_running_service()


_HEALTHS: Final[dict[str, Literal["unproven", "healthy", "rejected"]]] = {
    "unproven": "unproven",
    "healthy": "healthy",
    "rejected": "rejected",
}


def _describe_key(key_id: str) -> str:
    return f"encrypted with key {key_id}" if key_id else "not encrypted"


def _choose_trial(desired_model: DesiredModel) -> Literal["swap", "shadow", "canary"]:
    """Return how the service switches; a trial needs both versions in memory, and an old version."""
    return (
        desired_model.trial
        if desired_model.trial != "none" and desired_model.order == "new-first"
        else "swap"
    )


def describe_service(index: ServiceIndex, model: str) -> tuple[tuple[str, ...], str, str]:
    """Return how the service serves a model.

    Returns:
        The served versions, the version on trial or '', and a remark or ''. The remark is about the trial, or
            about the versions that are not served.
    """
    lines = index.get(model, [])
    served = tuple(line["version"] for line in lines if line["state"] == "READY" and line["version"])
    on_trial = [line for line in lines if line["version"] and line["reason"].startswith(_TRIALS)]
    if on_trial:
        return served, on_trial[0]["version"], on_trial[0]["reason"]
    return served, "", "; ".join(line["reason"] for line in lines if line["state"] != "READY")
