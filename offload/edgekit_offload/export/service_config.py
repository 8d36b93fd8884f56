"""The configuration of a service that runs tails, for `edgekit offload serve` and for replicas."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from edgekit_runtime.offload.latency_model import MAX_WAITING

LEAST_BYTES_PER_S: Final = 2048  # 16 kbit/s: plans are made for links far below the service's usual limit
MAX_BATCH: Final = MAX_WAITING // 2  # a device computes the answer itself before two full batches are done


def service_config(
    tails: Sequence[str], listen: Mapping[str, Any], *, devices: int, threads: int | None = None
) -> str:
    """Return the configuration of a service in TOML.

    The service batches requests, and reports times and load.

    Args:
        tails: The names under which the models are served.
        listen: The entries of the TOML table `listen`.
        devices: The maximum number of simultaneous TLS connections.
        threads: The number of threads per inference, or None for the number in the package.
    """
    model: dict[str, Any] = {"scheduling": {"max_batch": MAX_BATCH, "max_waiting": MAX_WAITING}}
    if threads is not None:
        model["threads"] = threads
    http = {
        "server_timing": True,
        "max_tls_connections": devices,
        "min_bytes_per_s": LEAST_BYTES_PER_S,
    }
    return _write_toml({"listen": dict(listen), "http": http, "models": dict.fromkeys(tails, model)})


def _write_toml(tables: Mapping[str, Any], prefix: str = "") -> str:
    """Return tables of strings, numbers and tables as TOML; a string of JSON is also a string of TOML."""
    plain = [f"{name} = {json.dumps(value)}" for name, value in tables.items() if not isinstance(value, dict)]
    lines = [f"[{prefix[:-1]}]", *plain] if prefix and plain else plain
    for name, value in tables.items():
        if isinstance(value, dict):
            lines.append(_write_toml(value, f"{prefix}{json.dumps(name)}."))
    return "\n".join(lines) + ("" if prefix else "\n")
