"""Models that hang for as long as a test wants them to."""

import threading
from collections.abc import Mapping
from typing import Any

from tests.service.service_parts import Array

from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits

ON_THREADS = ModelOptions(scheduling=SchedulingLimits(short_s=0))
"""Of a model that may hang: on the loop it would hold up the whole service."""


class Gated:
    """A session that hangs while it is held."""

    has_fixed_work = is_concurrent = True

    def __init__(self, session: Any) -> None:
        self._session = session
        self.inputs, self.outputs = session.inputs, session.outputs
        self.may_run = threading.Event()
        self.may_run.set()

    def run(self, inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        assert self.may_run.wait(60)
        found: Mapping[str, Array] = self._session.run(inputs)
        return found

    def close(self) -> None:
        self._session.close()


class Gate:
    """Before all sessions that were opened."""

    def __init__(self) -> None:
        self.sessions: list[Gated] = []

    def shut(self) -> None:
        """Hold those that are open now, but not those that are opened later."""
        for session in self.sessions:
            session.may_run.clear()

    def open(self) -> None:
        for session in self.sessions:
            session.may_run.set()
