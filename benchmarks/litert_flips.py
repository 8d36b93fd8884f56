"""What LiteRT does with damaged files: refuses, computes, or takes the process down.

    scripts/python benchmarks/litert_flips.py MODEL.tflite ... [--trials 300]

Each trial changes one byte of the structure (the first and last 16 kB, where a file keeps everything but its
weights) and loads and runs the model in a process of its own.
"""

import os
import random
import resource
import signal
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np

from edgekit_runtime.sessions.litert.engine import find_engine
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from processes import run_apart
from results import make_parser

STRUCTURE_BYTES = 16_384
TIME_LIMIT_S = 20
MEMORY_LIMIT_BYTES = 4 << 30


def try_once(content: bytes, options: LiteRtOptions) -> str:
    """Load and run; called in a process of its own."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(TIME_LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    session = LiteRtSession(content, options)
    sizes = [[size if isinstance(size, int) else 1 for size in spec.shape] for spec in session.inputs]
    session.run(
        {spec.name: np.ones(size, spec.dtype) for spec, size in zip(session.inputs, sizes, strict=True)}
    )
    return "computed"


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--trials", type=int, default=300)
    arguments = parser.parse_args()
    find_engine()  # imported once, before the processes split off
    for path in arguments.models:
        for options in (LiteRtOptions(), LiteRtOptions(xnnpack=False)):
            rng = random.Random(0)  # noqa: S311 - damage, no secret
            content = path.read_bytes()
            near = min(STRUCTURE_BYTES, len(content))
            outcomes: Counter[str] = Counter()
            for _ in range(arguments.trials):
                offset = rng.randrange(near) if rng.random() < 0.5 else len(content) - 1 - rng.randrange(near)
                changed = bytearray(content)
                changed[offset] ^= rng.randrange(1, 256)
                outcome = run_apart(partial(try_once, bytes(changed), options))
                outcomes[outcome.partition(": ")[0] if outcome.startswith("refused") else outcome] += 1
            print(f"{path.name}, {'xnnpack' if options.xnnpack else 'plain'}: {dict(outcomes.most_common())}")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file here
    main()
