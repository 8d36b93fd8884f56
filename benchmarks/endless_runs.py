"""What a request that never ends costs others, and how soon its model and the service recover.

    scripts/python -m benchmarks.endless_runs [--rounds 5] [--seconds 2]

For each kind (a loop in onnxruntime in process, on threads by configuration and isolated, a loop in LiteRT,
which is isolated by itself): p99 of another model's requests before and while a hostile request runs, whose
client leaves after each round; the time until its model answers again; and the time from SIGTERM to the end
while one runs. Goals: ratio 2 at most (median of the rounds), 5 s, 10 s. Read the ratios: the p99 is that of
a shared machine.
"""

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

import numpy as np
from benchmarks.results import make_parser, print_head
from tests.runtime.conftest import make_maker
from tests.runtime.slot_cases import write_keys
from tests.service.serve_parts import Served, served
from tests.service.service_parts import Replies, X, infer_bytes
from tests.service.test_endless_runs import CALM, PATH, attack, configure, write

KINDS: Final = {"in process": "loop", "threads": "loop", "isolated": "loop-isolated", "LiteRT": "while"}


def measure_p99_us(service: Served, seconds: float) -> float:
    """Return the p99 of requests for the other model, one after the other."""
    times = []
    with service.connect() as client:
        replies = Replies(client)
        end_s = time.perf_counter() + seconds
        while (began_s := time.perf_counter()) < end_s:
            client.sendall(infer_bytes(X))
            if replies.next().status != 200:
                raise SystemExit("a request for the other model failed")
            times.append(time.perf_counter() - began_s)
    return 1e6 * float(np.quantile(times, 0.99))


def measure_back_s(service: Served) -> float:
    """Return how long the attacked model takes to answer again."""
    began_s = time.perf_counter()
    while time.perf_counter() < began_s + 60:
        with service.connect() as client, contextlib.suppress(OSError):
            client.sendall(infer_bytes(CALM, path=PATH))
            if Replies(client).next().status == 200:
                break
        time.sleep(0.02)
    return time.perf_counter() - began_s


def measure(title: str, rounds: int, seconds: float) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        maker = make_maker()
        maker.write(folder / "linear.edgepkg")
        write_keys(folder / "keys")
        limits = "[models.endless.scheduling]\nshort_s = 0\n" if title == "threads" else ""
        with served(folder, *write(maker, folder, KINDS[title]), *configure(folder, limits)) as service:
            before, during, back_s = [], [], []
            for _ in range(rounds):
                before.append(measure_p99_us(service, seconds))
                (client,) = attack(service)
                during.append(measure_p99_us(service, seconds))
                client.close()
                back_s.append(measure_back_s(service))
            (client,) = attack(service)
            time.sleep(0.5)
            began_s = time.perf_counter()
            service.end()
            end_s = time.perf_counter() - began_s
            client.close()
    ratios = np.divide(during, before)
    shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return (
        f"| {title} | {np.median(before):.0f} | {np.median(during):.0f} | {np.median(ratios):.2f} ({shown})"
        f" | {max(back_s):.2f} | {end_s:.1f} |"
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    arguments = parser.parse_args()
    print_head("kind | p99 before, us | during | ratio, median (all) | model back, s, worst | SIGTERM, s")
    for title in KINDS:
        print(measure(title, arguments.rounds, arguments.seconds), flush=True)


if __name__ == "__main__":
    sys.exit(main())
