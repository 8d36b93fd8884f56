"""The configuration of a service that serves tails, for `edgekit offload serve` and for replicas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.remote.latency_model import MAX_WAITING

MAX_BATCH: Final = MAX_WAITING // 2  # a device answers by itself sooner than after two full batches


def service_config(
    tails: Sequence[str], listen: Mapping[str, Any], *, devices: int, threads: int | None = None
) -> str:
    """Return the TOML of a service that batches the requests of devices and states its times and load.

    Args:
        tails: the names that the models are served under.
        listen: the table `listen`.
        devices: connections with TLS at one time.
        threads: of one inference; None as packaged.
    """
    model: dict[str, Any] = {"scheduling": {"max_batch": MAX_BATCH, "max_waiting": MAX_WAITING}}
    if threads is not None:
        model["threads"] = threads
    http = {"server_timing": True, "max_tls_connections": devices}
    return _write_toml({"listen": dict(listen), "http": http, "models": dict.fromkeys(tails, model)})


def _write_toml(tables: Mapping[str, Any], prefix: str = "") -> str:
    """Return tables of strings, numbers and further tables as TOML; strings of JSON are strings of TOML."""
    plain = [f"{name} = {json.dumps(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    lines = [f"[{prefix[:-1]}]", *plain] if prefix and plain else plain
    for name, value in tables.items():
        if isinstance(value, dict):
            lines.append(_write_toml(value, f"{prefix}{json.dumps(name)}."))
    return "\n".join(lines) + ("" if prefix else "\n")
