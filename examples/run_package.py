"""Run a verified package in an application: needs `edgekit[device]` only.

Usage: run_package.py PACKAGE SAMPLES.npz
"""

import sys
from pathlib import Path

import numpy as np

from edgekit_runtime.sessions import open_session


def main() -> None:
    """Print the class of each sample of the package's only input."""
    session = open_session(Path(sys.argv[1]))
    (spec,) = session.inputs
    with np.load(sys.argv[2], allow_pickle=False) as samples:
        inputs = samples[spec.name][:8]
    for number, sample in enumerate(inputs):
        (scores,) = session.run({spec.name: sample[None]}).values()
        print(f"sample {number}: class {int(scores.argmax())}")
    session.close()


if __name__ == "__main__":
    main()
