"""What LiteRT does with damaged files: refuses, computes, or takes the process down.

    scripts/python benchmarks/litert_flips.py MODEL.tflite ... [--trials 300]

Each trial changes one byte of the structure (the first and last 16 kB, where a file keeps everything but its
weights) and loads and runs the model in a process of its own.
"""

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.sessions.litert.engine import find_engine
from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession
from results import make_parser

STRUCTURE_BYTES = 16_384
TIME_LIMIT_S = 20
MEMORY_LIMIT_BYTES = 4 << 30
COMPUTED, REFUSED, FAILED = 0, 3, 4


def try_once(content: bytes, options: LiteRtOptions) -> int:
    """Load and run; returns what happened. Called in a process of its own."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(TIME_LIMIT_S)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        session = LiteRtSession(content, options)
        sizes = [[size if isinstance(size, int) else 1 for size in spec.shape] for spec in session.inputs]
        feeds = {
            spec.name: np.ones(size, spec.dtype) for spec, size in zip(session.inputs, sizes, strict=True)
        }
        session.run(feeds)
    except EdgekitError:
        return REFUSED
    except MemoryError:
        return FAILED
    return COMPUTED


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
                outcomes[run_apart(bytes(changed), options)] += 1
            print(f"{path.name}, {'xnnpack' if options.xnnpack else 'plain'}: {dict(outcomes.most_common())}")


def run_apart(content: bytes, options: LiteRtOptions) -> str:
    child = os.fork()
    if not child:
        code = 70
        try:
            code = try_once(content, options)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    code = os.WEXITSTATUS(status)
    return {COMPUTED: "computed", REFUSED: "refused", FAILED: "out of memory"}.get(code, f"exit {code}")


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a text file here
    main()
