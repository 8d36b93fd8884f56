"""The application on the device of the offload evaluations: sessions of `open_session`, driven by orders.

Runs inside the emulated device and obeys `ProductBench`.
"""

import random
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from device_orders import obey
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.offload.measurement.link_probe import probe_link
from edgekit_runtime.offload.offload_status import Counts
from edgekit_runtime.offload.session import remote_session
from edgekit_runtime.offload.session.offload_state import OffloadState
from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.sessions.backends import open_session
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.system.processor_speed import SpeedGate, begin_anywhere
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore

PROBE_LIMIT_S = 15.0
LINK_S = 4.0  # of measuring the link
PROVE_S = 5.0
SHARE = 0.5  # of a processor, at most: the device gets slices of one
# Of the greatest value of an output, within which it is right: plans that send the input exactly change its
# last bits; 8 bits in a cut change more, and another row differs by more than that.
EXACT_TOLERANCE, LOSSY_TOLERANCE = 1e-3, 0.1


class SendClock:
    """Time that this process spends in `sendall`, which is what some estimate bandwidth from."""

    def __init__(self) -> None:
        self.seconds = 0.0
        plain = ssl.SSLSocket.sendall

        def timed(connection: ssl.SSLSocket, data: Any, flags: int = 0) -> None:
            begin_s = time.perf_counter()
            try:
                plain(connection, data, flags)
            finally:
                self.seconds += time.perf_counter() - begin_s

        ssl.SSLSocket.sendall = timed  # type: ignore[method-assign]


class LocalClock:
    """Time that sessions spend in local runs and in waiting for replies, and processor time there."""

    def __init__(self) -> None:
        self.seconds = self.cpu_s = self.wait_s = self.wait_cpu_s = 0.0
        run_local, await_reply = RemoteSession._run_local, remote_session._await_reply

        def time_local(session: RemoteSession, *what: Any) -> dict[str, Array]:
            begin_s, cpu_s = time.monotonic(), time.process_time()
            try:
                return run_local(session, *what)
            finally:
                self.seconds += time.monotonic() - begin_s
                self.cpu_s += time.process_time() - cpu_s

        def time_wait(*what: Any) -> bool:
            begin_s, cpu_s = time.monotonic(), time.thread_time()
            is_there = await_reply(*what)
            self.wait_s += time.monotonic() - begin_s
            self.wait_cpu_s += time.thread_time() - cpu_s
            return is_there

        RemoteSession._run_local = time_local  # type: ignore[method-assign]
        remote_session._await_reply = time_wait

    def reset(self) -> None:
        self.seconds = self.cpu_s = self.wait_s = self.wait_cpu_s = 0.0


class Application:
    def __init__(self) -> None:
        self.send_clock, self.local_clock = SendClock(), LocalClock()
        self.sessions: dict[str, Session] = {}
        self.rows: list[dict[str, Array]] = []
        self.expected: list[dict[str, Array]] = []
        self.tolerance = EXACT_TOLERANCE
        self.number, self.draws = 0, random.Random(0)  # noqa: S311  # of moments

    def load(
        self, packages: dict[str, str], local: str, rows: str, *, is_exact: bool
    ) -> dict[str, list[str]]:
        """Open sessions, and compute what is right; return which are ready to use the server."""
        for session in self.sessions.values():
            session.close()
        self.tolerance = EXACT_TOLERANCE if is_exact else LOSSY_TOLERANCE
        with np.load(rows) as found:
            arrays = dict(found)
        count = len(next(iter(arrays.values())))
        self.rows = [{name: array[n : n + 1] for name, array in arrays.items()} for n in range(count)]
        trust = TrustStore.from_folder(find_keys_folder())
        whole = open_session(Path(local), trust=trust)
        self.expected = [whole.run(row) for row in self.rows]
        whole.close()
        self.sessions = {name: open_session(Path(path), trust=trust) for name, path in packages.items()}
        ready = []
        for name, session in self.sessions.items():
            if isinstance(session, RemoteSession) and session.wait_for_probe(PROBE_LIMIT_S):
                ready.append(name)
        return {"ready": ready}

    def wait_for_server(self, name: str, seconds: float) -> bool:
        """Ask until a session uses the server; return whether it does."""
        session, until_s = self.sessions[name], time.monotonic() + seconds
        assert isinstance(session, RemoteSession)
        while session.decision().plan.tail is None and time.monotonic() < until_s:
            session.run(self.rows[0])
            time.sleep(0.05)
        return session.decision().plan.tail is not None

    def set_hedging(self, is_on: bool) -> None:
        """Switch hedging off, which the product cannot: wait for a reply as long as its time limit."""
        if is_on:
            OffloadState.allow_s = ALLOW_S  # type: ignore[method-assign]
        else:
            OffloadState.allow_s = lambda *_: 3600.0  # type: ignore[method-assign]

    def probe(self, server: str, token: str, ca_file: str) -> dict[str, Any]:
        """Measure the link as `edgekit offload plan --server URL` does."""
        return to_plain(probe_link(server, token=token, ca_file=ca_file, seconds=LINK_S))

    def use(self, name: str, plan: str | None) -> bool:
        """Make a session run a plan, as the option `plan` of a device does; return whether it does.

        None leaves the choice to the session.
        """
        session = self.sessions[name]
        assert isinstance(session, RemoteSession)
        session.state.ask_for(plan)
        return plan is None or session.decision().plan.name == plan

    def prove(self, name: str, plans: list[str], seconds: float) -> list[str]:
        """Ask until a session can run each plan; return those that it can."""
        proved, until_s = [], time.monotonic() + seconds
        for plan in plans:
            while not (is_usable := self.use(name, plan)) and time.monotonic() < until_s:
                self.sessions[name].run(self.rows[0])
                time.sleep(0.05)
            if is_usable:
                proved.append(plan)
        self.use(name, None)
        return proved

    def take_turns(
        self,
        forced: str,
        free: str,
        plans: dict[str, bool],
        *,
        most: int,
        seconds: float,
        pause_s: float,
        usual_s: float | None,
    ) -> dict[str, list[dict[str, Any]]]:
        """Run requests with each plan, and with the one that a session chooses, in turn.

        In its turn a way answers one request that does not count, and then all inputs in a row, as a device
        does. A way has no more turns once it has used its share of the time, unless it lacks an input.

        Args:
            forced: session that is told its plan.
            free: session that chooses; its records are under its name.
            plans: name -> whether a request only counts at the speed of planning.
            most: turns of a way.
            seconds: time limit of all together, three times that where requests do not count.
            pause_s: before each request.
            usual_s: the speed of planning (`SpeedGate`).
        """
        gate = SpeedGate(usual_s)
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in (*plans, free)}
        lacking, lost = dict.fromkeys(found, len(self.rows)), set[str]()
        names, orders, began_s = list(found), np.random.default_rng(0), time.monotonic()
        for turn in range(most):
            for at in orders.permutation(len(names)):
                name = names[at]
                spent_s = sum(one["s"] + pause_s for one in found[name] if one["counts"])
                is_late = time.monotonic() - began_s > 3 * seconds and found[name]
                if is_late or (not lacking[name] and spent_s > seconds / len(names)):
                    continue
                if name in lost or (name != free and not self._use_again(forced, name)):
                    lost.add(name)
                    continue
                session = self.sessions[free if name == free else forced]
                self._ask(session, 0)
                time.sleep(pause_s / 2)
                for number in range(len(self.rows)):
                    time.sleep(pause_s / 2)
                    record = self._ask(session, number)
                    time.sleep(pause_s / 2)  # threads of the request end, and do not slow the gate's work
                    record |= {"turn": turn, "counts": gate.check() or not plans.get(name, True)}
                    found[name].append(record)
                lacking[name] = len(self.rows) - len({one["input"] for one in found[name] if one["counts"]})
        return found

    def _use_again(self, name: str, plan: str) -> bool:
        """Make a session run a plan, which it may have to prove again after a fault."""
        return self.use(name, plan) or (bool(self.prove(name, [plan], PROVE_S)) and self.use(name, plan))

    def run(
        self, name: str, count: int = 1, seconds: float = 1e9, pause_s: float = 0.0
    ) -> list[dict[str, Any]]:
        """Run requests one after the other, so many or so long."""
        found, until_s = [], time.monotonic() + seconds
        while len(found) < count and time.monotonic() < until_s:
            self.number += 1
            found.append(self._ask(self.sessions[name], self.number))
            if pause_s:
                time.sleep(pause_s)
        return found

    def alternate(self, names: list[str], seconds: float) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.number += 1
            for name in names:
                found[name].append(self._ask(self.sessions[name], self.number))
        return found

    def _ask(self, session: Session, number: int) -> dict[str, Any]:
        place = number % len(self.rows)
        plan, predicted_s, before = "local", 0.0, Counts()
        if isinstance(session, RemoteSession):
            decision = session.decision()
            plan, predicted_s, before = decision.plan.name, decision.predicted_s, replace(session.counts)
        begin_anywhere(self.draws, SHARE)
        at_s, cpu_s = time.monotonic(), time.process_time()
        self.send_clock.seconds = 0.0
        self.local_clock.reset()
        record = {"plan": plan, "input": place, "predicted_s": predicted_s, "at_s": at_s}
        try:
            outputs = session.run(self.rows[place])
        except EdgekitError as cause:
            return {**record, "s": time.monotonic() - at_s, "is_right": False, "error": str(cause)}
        record |= {"s": time.monotonic() - at_s, "cpu_s": time.process_time() - cpu_s}
        record["send_s"] = self.send_clock.seconds
        if isinstance(session, RemoteSession):
            is_hedged = session.counts.hedged > before.hedged
            clock = self.local_clock
            record |= {"is_hedged": is_hedged, "is_of_server": session.counts.remote > before.remote}
            record["wait_s"] = clock.wait_s
            record |= {"local_s": clock.seconds, "hedge_cpu_s": clock.wait_cpu_s + is_hedged * clock.cpu_s}
        return {**record, "is_right": self._is_right(outputs, place)}

    def _is_right(self, outputs: dict[str, Array], place: int) -> bool:
        for name, right in self.expected[place].items():
            if np.abs(outputs[name] - right).max() > self.tolerance * np.abs(right).max():
                return False
        return True

    def cpu_s(self) -> float:
        return time.process_time()


ALLOW_S = OffloadState.allow_s


if __name__ == "__main__":
    obey(Application())
