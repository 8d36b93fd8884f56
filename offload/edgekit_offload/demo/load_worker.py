"""Emulates other devices that keep the server busy. It is run as `load_worker CONFIG ADDRESS`.

It runs on the server's side, so that the load uses no bandwidth of the device. Each thread repeatedly
requests the tail that needs the most time on the server.
"""

import contextlib
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import numpy as np

from edgekit_offload.demo.device_worker import WorkerConfig
from edgekit_runtime.client.client import Client
from edgekit_runtime.dataclass_json import from_json
from edgekit_runtime.errors import ConfigError, EdgekitError
from edgekit_runtime.offload.cut_table import read_cut_table
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.child_process import end_with_parent
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore

_DEVICES: Final = 6
_RETRY_S: Final = 0.2


def find_costliest(config: WorkerConfig) -> tuple[str, dict[str, Array]]:
    """Return the name of the tail that takes the longest on the server, and zeros as its inputs.

    Raises:
        ConfigError: No plan of the package uses a server.
    """
    with read_package(Path(config.package), TrustStore.from_folder(Path(config.home) / "keys")) as package:
        table = read_cut_table(package)
        plans = [
            plan
            for plan in (() if table is None else table.plans)
            if plan.tail is not None and not plan.media
        ]
        served = {
            view.name: view
            for view in (
                package.manifest.select_submodel(submodel.name) for submodel in package.manifest.submodels
            )
        }
        served_plans = [plan for plan in plans if plan.tail in served]
        if not served_plans:
            raise ConfigError(f"{config.package}: no plan uses a server without a media codec")
        chosen = served[str(max(served_plans, key=lambda plan: plan.costs.server_s).tail)]
        zeros = {
            spec.name: np.zeros([size if isinstance(size, int) else 1 for size in spec.shape], spec.dtype)
            for spec in chosen.inputs
        }
        return chosen.name, zeros


def _ask_forever(config: WorkerConfig, address: str, name: str, inputs: Mapping[str, Array]) -> None:
    client = Client(address, token=config.read_token(), ca_file=config.ca_file or None)
    while True:
        with contextlib.suppress(EdgekitError):  # errors do not matter: this is load, no measurement
            client.infer(name, inputs)
            continue
        time.sleep(_RETRY_S)


def main() -> None:
    """Send requests over several connections until the process is terminated."""
    end_with_parent()
    config = from_json(WorkerConfig, Path(sys.argv[1]).read_bytes(), sys.argv[1])
    name, inputs = find_costliest(config)
    threads = [
        threading.Thread(target=_ask_forever, args=(config, sys.argv[2], name, inputs), daemon=True)
        for _ in range(_DEVICES)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
