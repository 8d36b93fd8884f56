"""Other devices that keep the only model of a server busy: `offload_load URL TOKEN CA_FILE CONNECTIONS`."""

import contextlib
import sys
import threading
import time

import numpy as np

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.protocol.datatypes import DTYPE_OF_DATATYPE
from edgekit_runtime.system.child_process import end_with_parent


def main() -> None:
    end_with_parent()
    url, token, ca_file, connections = sys.argv[1:]
    with Client(url, token=token, ca_file=ca_file) as client:
        model = client.index()[0]["name"]
        inputs = client.metadata(model)["inputs"]
    feeds = {
        one["name"]: np.zeros(np.abs(one["shape"]), DTYPE_OF_DATATYPE[one["datatype"]]) for one in inputs
    }

    def ask() -> None:
        client = Client(url, token=token, ca_file=ca_file, timeout_s=30)
        while True:
            with contextlib.suppress(EdgekitError):  # refused: this is load, not a measurement
                client.infer(model, feeds)
                continue
            time.sleep(0.05)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(int(connections))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
