"""Send requests to the service until a file appears, and print their outcomes.

Arguments: MODEL STOP_FILE PACKAGE... The input is the first package's golden one, and each answer must be
what one of the packages computes from it in this process. Prints `{"seconds": [of each answer], "at_s": [when
each came], "refused": number of requests that were refused to hold a limit, "errors": [the first messages]}`.
"""

import json
import sys
import time
from pathlib import Path

import numpy as np

from edgekit_runtime import Client, open_session
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.sessions.selftest import read_golden_inputs
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.tensors import Array
from edgekit_runtime.trust.trust_store import TrustStore

MOST_ERRORS = 10
LIMIT = "refused to hold a limit"
PAUSE_S = 0.01  # after a refusal
TOLERANCE = 1e-4  # the service may batch, which changes the order of sums


def is_right(answer: dict[str, Array], expected: list[dict[str, Array]]) -> bool:
    """Return whether an answer is that of one package, in all outputs."""
    return any(
        all(np.allclose(answer[name], output[name], rtol=TOLERANCE, atol=TOLERANCE) for name in output)
        for output in expected
    )


def main() -> None:
    """Send and print."""
    model, stop, paths = sys.argv[1], Path(sys.argv[2]), [Path(argument) for argument in sys.argv[3:]]
    with read_package(paths[0], TrustStore.from_folder(find_keys_folder())) as package:
        feeds = read_golden_inputs(package)
    expected = [open_session(path).run(feeds) for path in paths]
    seconds: list[float] = []
    at_s: list[float] = []
    errors: list[str] = []
    refused, first_s = 0, time.perf_counter()
    stop.with_name("begun").touch()
    with Client() as client:
        while not stop.exists() and len(errors) < MOST_ERRORS:
            begun_s = time.perf_counter()
            try:
                answer = client.infer(model, feeds)
            except EdgekitError as error:
                if LIMIT in str(error):
                    refused += 1
                    time.sleep(PAUSE_S)
                else:
                    errors.append(str(error))
                continue
            seconds.append(time.perf_counter() - begun_s)
            at_s.append(begun_s - first_s)
            if not is_right(answer, expected):
                errors.append(f"answer {len(seconds)} is of no version")
    print(json.dumps({"seconds": seconds, "at_s": at_s, "refused": refused, "errors": errors}))


if __name__ == "__main__":
    main()
