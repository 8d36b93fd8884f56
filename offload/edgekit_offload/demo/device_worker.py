"""The demo's application on the device. It is run as `device_worker CONFIG`.

It sends requests until it is terminated, and writes one line of JSON for each request. For every second
request, edgekit chooses the plan. The other requests use the configured plans in turn. Each plan has its own
connection.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from edgekit_offload.demo.recording import EDGEKIT
from edgekit_runtime.client.link import Address
from edgekit_runtime.codecs.media import MediaCodec, encode_media
from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.errors import ConfigError, EdgekitError, TransportError
from edgekit_runtime.offload.choose import PlanChoice
from edgekit_runtime.offload.cut_table import read_cut_table
from edgekit_runtime.offload.offload_options import OffloadOptions, write_offload_options
from edgekit_runtime.offload.offload_plan import LOCAL, OffloadPlan
from edgekit_runtime.offload.offload_server import OffloadServer, make_tail_request
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.package.archive import OpenedPackage, read_package
from edgekit_runtime.sessions.backends import open_choice, open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.child_process import end_with_parent
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore

_START_LIMIT_S: Final = 60.0
_FORCED_TIMEOUT_S: Final = 3.0
_PAUSE_S: Final = 0.01
_RETRY_S: Final = 0.3

Ask: TypeAlias = Callable[[Mapping[str, Array]], dict[str, Array]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """The configuration of the worker.

    Attributes:
        package: The path of the package with the cut table and submodels.
        home: The folder of edgekit's files. Its subfolder `keys` contains the trusted keys.
        server: The address of the server for the device, `http://host:port` or `https://host:port`.
        token_file: The path of the file with the server's token, or empty.
        ca_file: The path of the CA certificate for the server in PEM format, or empty.
        plans: The names of the plans that are forced in turn.
        requests: The path of a .npz with an array for each input, one request per row, and the correct
            answers in `classes`.
        output: The name of the tensor whose largest value is the answer.
    """

    package: str
    home: str
    server: str
    token_file: str
    ca_file: str
    plans: tuple[str, ...]
    requests: str
    output: str

    def read_token(self) -> str | None:
        return Path(self.token_file).read_text(encoding="ascii").strip() if self.token_file else None


class ForcedPlan:
    """A plan that always runs, without choosing, fallback or hedging.

    It uses the same connections and codecs as edgekit's own session, so that results can be compared.
    """

    def __init__(self, package: OpenedPackage, plan: OffloadPlan, config: WorkerConfig) -> None:
        """Open the plan's models on the device, and a connection for it.

        Raises:
            EdgekitError: the package lacks a model that the plan names.
        """
        self._plan = plan
        self._head: Session | None = None
        if plan.head is not None:
            self._head = open_session(package.select_submodel(plan.head))
        views = [package.select_submodel(submodel.name) for submodel in package.manifest.submodels]
        self._tail = next(view.manifest for view in views if view.manifest.name == plan.tail)
        address = Address.parse(config.server, config.ca_file or None)
        self._server = OffloadServer(address, config.read_token())

    def ask(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run a request with this plan, and return the outputs by name.

        Raises:
            EdgekitError: The server did not answer, or not in time.
        """
        sent = dict(inputs) if self._head is None else self._head.run(inputs)
        for name, codec in self._plan.media.items():
            sent[name] = np.frombuffer(encode_media(MediaCodec.parse(codec), sent[name][0]), np.uint8)
        tensors = {spec.name: sent[spec.name] for spec in self._tail.inputs}
        fields, compression = self._server.fields, self._plan.compression
        request = make_tail_request(self._tail.name, tensors, self._tail.outputs, compression, fields)
        pending = self._server.send(request, _FORCED_TIMEOUT_S, lambda _pending, _reply: None)
        pending.done.wait()
        if pending.reply is None or pending.reply.outputs is None:
            error = None if pending.reply is None else pending.reply.error
            raise TransportError(f"the server gave no answer: {error}") from error
        return pending.reply.outputs


class Worker:
    def __init__(self, config: WorkerConfig) -> None:
        """Open the package, and all models and connections that the plans need.

        Raises:
            EdgekitError: the package does not match the configuration.
        """
        self._config = config
        # As `edgekit-device offload server URL` does on a device.
        token_file, ca_file = config.token_file or None, config.ca_file or None
        write_offload_options(OffloadOptions(config.server, token_file=token_file, ca_file=ca_file))
        trust = TrustStore.from_folder(find_keys_folder())
        self._package = read_package(Path(config.package), trust)
        opened = open_session(self._package)
        if not isinstance(opened, RemoteSession):
            raise ConfigError(f"{config.package}: holds no plan that uses a server")
        self._session = opened
        backend = self._package.manifest.backend
        # From the same package, so that both run in the same way.
        self._local = open_choice(self._package, backend.fallback or backend, None)
        table = read_cut_table(self._package)
        plans = {} if table is None else {plan.name: plan for plan in table.plans}
        missing = sorted(set(config.plans) - set(plans))
        if missing:
            raise ConfigError(f"{config.package}: the cut table has no plan {', '.join(missing)}")
        self._plans: dict[str, Ask] = {}
        for name in config.plans:
            plan = plans[name]
            self._plans[name] = (
                self._run_local if plan.tail is None else ForcedPlan(self._package, plan, config).ask
            )
        with np.load(config.requests) as stored:
            self._classes = stored["classes"]
            self._inputs = {name: stored[name] for name in stored.files if name != "classes"}

    def run(self) -> None:
        self._warm_up()
        number = 0
        print(json.dumps({"ready": True}), flush=True)
        while True:
            self._ask(EDGEKIT, number)
            self._ask(self._config.plans[number % len(self._config.plans)], number)
            number += 1

    def _run_local(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._local.run(inputs)

    def _warm_up(self) -> None:
        """Run each plan once, and wait until the server answers and edgekit may use it.

        Raises:
            TransportError: it did not answer in time.
        """
        deadline = time.monotonic() + _START_LIMIT_S
        row = self._row(0)
        for name, ask in self._plans.items():
            while not self._answers(name, ask, row, is_last=time.monotonic() > deadline):
                time.sleep(_RETRY_S)
        runners = self._session.state.runners.values()
        while not any(runner.is_proved for runner in runners) and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
        self._session.run(row)

    def _answers(self, name: str, ask: Ask, row: Mapping[str, Array], *, is_last: bool) -> bool:
        try:
            ask(row)
        except EdgekitError as cause:
            if is_last:
                raise TransportError(f"plan '{name}' got no answer: {cause}") from cause
            return False
        return True

    def _row(self, number: int) -> dict[str, Array]:
        at = number % len(self._classes)
        return {name: values[at : at + 1] for name, values in self._inputs.items()}

    def _ask(self, policy: str, number: int) -> None:
        row = self._row(number)
        before, remote = self._session.decision(), self._session.counts.remote
        begin_s = time.monotonic()
        try:
            answer = (self._session.run if policy == EDGEKIT else self._plans[policy])(row)
        except EdgekitError as cause:
            record = {"at_s": begin_s, "policy": policy, "plan": "", "reason": str(cause), "is_right": False}
            self._write(record)
            time.sleep(_PAUSE_S)
            return
        latency_s = time.monotonic() - begin_s
        is_remote = self._session.counts.remote > remote
        expected = int(self._classes[number % len(self._classes)])
        scores = answer.get(self._config.output)
        is_right = scores is not None and scores.size > expected and int(scores.argmax()) == expected
        plan, reason = (policy, "") if policy != EDGEKIT else self._explain(before, is_remote=is_remote)
        self._write(
            {
                "at_s": begin_s,
                "policy": policy,
                "plan": plan,
                "latency_s": latency_s,
                "is_right": is_right,
                "reason": reason,
            }
        )
        time.sleep(_PAUSE_S)

    def _explain(self, before: PlanChoice, *, is_remote: bool) -> tuple[str, str]:
        """Return the plan that gave the last answer, and why."""
        if is_remote or before.plan.tail is None:
            return before.plan.name, before.reason
        return LOCAL, f"{before.plan.name} gave no answer in time; {self._session.decision().reason}"

    def _write(self, record: Mapping[str, object]) -> None:
        print(json.dumps(record), flush=True)


def main() -> None:
    """Send requests until the process is terminated. The first argument is the path of the configuration."""
    end_with_parent()
    Worker(from_json(WorkerConfig, Path(sys.argv[1]).read_bytes(), sys.argv[1])).run()


if __name__ == "__main__":
    main()
