"""A loop as a camera has it: frames in shared memory, a deadline for each, none that holds up the next.

Usage: camera_loop.py SOCKET MODEL [FRAMES]   (needs `edgekit[device]` only)
"""

import sys
import time

import numpy as np

from edgekit_runtime import Client
from edgekit_runtime.errors import EdgekitError, RequestError, TransportError

INTERVAL_S = 1 / 30


def main() -> None:
    """Send frames at 30 a second and say how it went."""
    address, model = sys.argv[1:3]
    frames = int(sys.argv[3]) if len(sys.argv) > 3 else 90
    with Client(address) as client:
        (spec,) = client.metadata(model)["inputs"]
        shape = [size if size > 0 else 1 for size in spec["shape"]]
        frame = client.shared(shape)  # the service reads it where it is
        camera = np.random.default_rng(0)
        answered, late, seconds = 0, 0, []
        next_s = time.monotonic()
        for _ in range(frames):
            camera.random(out=frame, dtype=np.float32)
            began_s = time.monotonic()
            try:
                client.infer(model, {spec["name"]: frame}, timeout_s=INTERVAL_S)
            except TransportError:  # no answer in time; the next frame is newer anyway
                late += 1
            except RequestError as error:
                if error.status not in (503, 504):  # a busy service sheds
                    raise
                late += 1
            else:
                answered += 1
                seconds.append(time.monotonic() - began_s)
            next_s += INTERVAL_S
            time.sleep(max(0.0, next_s - time.monotonic()))
        print(f"{answered} of {frames} frames answered, {late} shed or late")
        print(f"median {1e3 * sorted(seconds)[len(seconds) // 2]:.2f} ms" if seconds else "no frame in time")


if __name__ == "__main__":
    try:
        main()
    except EdgekitError as error:
        sys.exit(f"camera_loop: {error}")
