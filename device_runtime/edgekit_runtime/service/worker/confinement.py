"""Limits the memory and priority of a worker process before it loads anything."""

import faulthandler
import os
import resource
import signal
from pathlib import Path
from typing import Final

from edgekit_runtime.service.options.model import Isolation

_OOM_SCORE: Final = Path("/proc/self/oom_score_adj")


def confine(isolation: Isolation) -> list[str]:
    """Limit the memory and priority of this process, and ignore SIGINT, SIGTERM and SIGHUP.

    Returns:
        A message for each limit that could not be set.
    """
    # A crash prints its Python stack and writes no core file: that takes seconds, in which the service does
    # not see that the process has ended. The limit is 1 byte, since 0 does not hold where cores are piped to
    # a program, see core(5).
    faulthandler.enable()
    refused = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the service, which ends this process in its turn
    limits = [(resource.RLIMIT_CORE, 1)]
    if isolation.max_data_bytes is not None:
        limits.append((resource.RLIMIT_DATA, isolation.max_data_bytes))
    for kind, limit in limits:
        hard = resource.getrlimit(kind)[1]
        within = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(kind, (within, within))
        except (OSError, ValueError) as cause:
            refused.append(f"limit {kind} of {within}: {cause}")
    if isolation.niceness:
        os.nice(isolation.niceness)
    try:
        # Never below what the service has been given itself, which would need a privilege.
        _OOM_SCORE.write_text(str(max(isolation.oom_score, int(_OOM_SCORE.read_text()))))
    except OSError as cause:
        refused.append(f"oom_score_adj {isolation.oom_score}: {cause}")
    return refused
