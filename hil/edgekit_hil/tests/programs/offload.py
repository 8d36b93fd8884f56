"""Run a package that can use a server until a file appears; print a line of JSON after each answer.

Arguments: PACKAGE STOP_FILE LOCAL_S. Each run on the device alone waits for LOCAL_S, to stand for a model for
which a server is worthwhile. A line is `{"requests", "wrong", "local", "remote", "late", "failed": counts,
"plan", "reason": what runs next, and why, "at_s", "took_s"}`. An answer is wrong if it differs from the
answer that the device computes alone.
"""

import itertools
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgekit_runtime.offload.session.remote_session import RemoteSession
from edgekit_runtime.sessions import Session, open_session
from edgekit_runtime.tensors import Array

TOLERANCE = 1e-3  # two machines may round a sum in another order
INPUTS = 4
PAUSE_S = 0.02  # between two requests


class SlowSession:
    """A session whose runs take longer."""

    def __init__(self, session: Session, more_s: float) -> None:
        self._session, self._more_s = session, more_s
        self.close = session.close

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Wait, and return the outputs."""
        time.sleep(self._more_s)
        return self._session.run(inputs)


def main() -> None:
    """Run and print."""
    session, stop = open_session(Path(sys.argv[1])), Path(sys.argv[2])
    assert isinstance(session, RemoteSession) and session.local is not None
    numbers = np.random.default_rng(0)
    (spec,) = session.inputs
    shape = [1 if isinstance(size, str) else size for size in spec.shape]
    feeds = [{spec.name: numbers.normal(size=shape).astype(spec.dtype)} for _ in range(INPUTS)]
    expected = [session.local.run(feed) for feed in feeds]
    session.local = SlowSession(session.local, float(sys.argv[3]))  # type: ignore[assignment]
    wrong, first_s = 0, time.perf_counter()
    for number in itertools.count():
        if stop.exists():
            break
        begun_s = time.perf_counter()
        answer = session.run(feeds[number % INPUTS])
        took_s = time.perf_counter() - begun_s
        wrong += not all(
            np.allclose(answer[name], right, rtol=TOLERANCE, atol=TOLERANCE)
            for name, right in expected[number % INPUTS].items()
        )
        counts = session.counts
        line = {
            "requests": number + 1,
            "wrong": wrong,
            "local": counts.local,
            "remote": counts.remote,
            "late": counts.hedged,
            "failed": counts.failed,
            "plan": session.decision().plan.name,
            "reason": session.decision().reason,
            "at_s": begun_s - first_s,
            "took_s": took_s,
        }
        print(json.dumps(line), flush=True)
        time.sleep(PAUSE_S)
    session.close()


if __name__ == "__main__":
    main()
