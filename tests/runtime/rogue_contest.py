"""A measuring process whose LiteRT does what the environment's ROGUE says: for a test that starts it."""

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

from edgekit_runtime.autotune import contest_child
from edgekit_runtime.engines.litert import LITERT
from edgekit_runtime.sessions import register


def open_litert(package: Any, choice: Any, threads: int | None) -> Any:
    os.write(2, b"engine: \xff\xfe\n")
    if os.environ["ROGUE"] in ("hang", "stay"):
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGSEGV)


if __name__ == "__main__":
    if os.environ["ROGUE"] != "stay":
        contest_child._OPENING_S = 4.0  # type: ignore[misc]
    register(replace(LITERT, open=open_litert))
    sys.exit(contest_child.run())
