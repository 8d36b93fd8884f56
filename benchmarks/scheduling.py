"""What a lane costs and what batches bring; run with `scripts/python benchmarks/scheduling.py`.

Ratios within one run; interleaved, medians. It needs nothing but the checkout.
"""

import asyncio
import queue
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgekit_runtime.service.observability.metrics import Histogram, LaneMetrics
from edgekit_runtime.service.options.model import SchedulingLimits
from edgekit_runtime.service.scheduling.call import Answer, Call
from edgekit_runtime.service.scheduling.fair_pool import Pool, Threads
from edgekit_runtime.service.scheduling.scheduler import Scheduler
from edgekit_runtime.sessions.instances import warm_up
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.sessions.session import Session
from results import make_parser

TINY = Path(__file__).parents[1] / "models" / "tiny"
OUTSTANDING = 16


def open_tiny(name: str) -> tuple[OrtSession, dict[str, Any]]:
    session = OrtSession(TINY / f"{name}.onnx", OrtOptions(threads=1))
    session.has_fixed_work = True
    (spec,) = session.inputs
    shape = tuple(1 if isinstance(size, str) else size for size in spec.shape)
    return session, {spec.name: np.random.default_rng(0).normal(size=shape).astype(spec.dtype)}


class Nothing:
    """A session that returns what it has, so that only the lane is measured."""

    has_fixed_work = is_concurrent = True

    def __init__(self, like: Session) -> None:
        self.inputs, self.outputs = like.inputs, like.outputs
        self.answer = {spec.name: np.zeros((1, 10), np.float32) for spec in like.outputs}

    def run(self, inputs: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002  # as in the protocol
        return self.answer

    def close(self) -> None:
        pass


def make_lane(session: Session, feed: dict[str, Any], pool: Pool, **limits: Any) -> Scheduler:
    lane = Scheduler(
        (session,),
        SchedulingLimits(**limits),
        pool=pool,
        loop=asyncio.get_running_loop(),
        metrics=LaneMetrics("model", "1"),
    )
    for run in warm_up((session,), feed, max_batch=limits.get("max_batch", 1)):
        lane.learn(run.size_bytes, run.seconds)
    return lane


def time_us(what: Callable[[], object], times: int) -> float:
    begin = time.perf_counter()
    for _ in range(times):
        what()
    return (time.perf_counter() - begin) / times * 1e6


async def fast_path(pool: Pool) -> None:
    """Added time of a call on the loop: over the session's own `run` and reply."""
    real, feed = open_tiny("digits_cnn")
    for name, session in (("a session that does nothing", Nothing(real)), ("digits_cnn", real)):
        lane = make_lane(session, feed, pool)
        answers: list[Answer] = [{}]

        def reply(answer: Answer, answers: list[Answer] = answers) -> None:
            answers[0] = answer

        call = Call(feed, reply)
        rounds = [
            (
                time_us(lambda lane=lane, call=call: lane.submit(call), 1000),
                time_us(lambda session=session, reply=reply: reply(session.run(feed)), 1000),
            )
            for _ in range(60)
        ]
        added = statistics.median(with_lane - bare for with_lane, bare in rounds)
        bare = statistics.median(bare for _, bare in rounds)
        print(f"on the loop, {name}: bare {bare:.2f} us, the lane adds {added:.2f} us", flush=True)
    histogram = Histogram()
    observation = statistics.median(time_us(lambda: histogram.observe(123e-6), 1000) for _ in range(60))
    print(f"one observation of a histogram: {observation:.2f} us")


async def hand_over(threads: Threads, pool: Pool) -> None:
    """Time from the submission of a call that does nothing to its answer, through a thread."""
    loop = asyncio.get_running_loop()
    real, feed = open_tiny("digits_cnn")
    lane = make_lane(Nothing(real), feed, pool, short_s=0.0)
    found: dict[str, list[float]] = {"deque and eventfd": [], "call_soon_threadsafe": [], "a lane": []}

    class Plain:
        def __init__(self) -> None:
            self.done = asyncio.Event()

        def run(self) -> None:
            pass

        def finish(self) -> None:
            self.done.set()

    jobs: queue.SimpleQueue[Plain | None] = queue.SimpleQueue()

    def work() -> None:
        while (job := jobs.get()) is not None:
            job.run()
            loop.call_soon_threadsafe(job.finish)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(2000):
        for name, start in (("deque and eventfd", threads.start), ("call_soon_threadsafe", jobs.put)):
            job = Plain()
            begin = time.perf_counter()
            start(job)
            await job.done.wait()
            found[name].append(time.perf_counter() - begin)
        done = asyncio.Event()
        begin = time.perf_counter()
        lane.submit(Call(feed, lambda _, done=done: done.set()))
        await done.wait()
        found["a lane"].append(time.perf_counter() - begin)
    jobs.put(None)
    thread.join()
    for name, seconds in found.items():
        print(f"through a thread and back, {name}: {statistics.median(seconds) * 1e6:.1f} us")


async def throughput(pool: Pool, name: str, seconds: float) -> None:
    """Calls a second with as many outstanding as `OUTSTANDING`, each answer bringing the next call."""
    session, feed = open_tiny(name)
    ways: dict[str, dict[str, Any]] = {
        "on the loop": {"short_s": 10.0},
        "on a thread": {"short_s": 0.0},
        "batches of 8 on a thread": {"short_s": 0.0, "max_batch": 8},
        "batches of 16 on a thread": {"short_s": 0.0, "max_batch": 16},
        "batches of 16 on the loop, delay 0.2 ms": {"short_s": 10.0, "max_batch": 16, "max_delay_s": 2e-4},
    }
    lanes = {way: make_lane(session, feed, pool, **limits) for way, limits in ways.items()}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(5):
        for way, lane in lanes.items():
            rates[way].append(await drive(lane, feed, seconds))
    single = statistics.median(rates["on a thread"])
    for way, found in rates.items():
        rate, runs = statistics.median(found), lanes[way].metrics.runs
        mean = sum(calls * run.count for calls, run in runs.items()) / sum(run.count for run in runs.values())
        print(
            f"{name}, {way}: {rate:,.0f} calls/s, {rate / single:.2f} x, {mean:.1f} calls a run", flush=True
        )


async def drive(lane: Scheduler, feed: dict[str, Any], seconds: float) -> float:
    loop = asyncio.get_running_loop()
    end = time.perf_counter() + seconds
    count, under_way = 0, OUTSTANDING
    everything = asyncio.Event()

    def reply(_: Answer) -> None:
        nonlocal count, under_way
        count += 1
        if time.perf_counter() < end:
            loop.call_soon(lane.submit, call)  # a client's next request comes in a later turn of the loop
            return
        under_way -= 1
        if not under_way:
            everything.set()

    call = Call(feed, reply)
    begin = time.perf_counter()
    for _ in range(OUTSTANDING):
        lane.submit(call)
    await everything.wait()
    return count / (time.perf_counter() - begin)


async def main(seconds: float, models: list[str]) -> None:
    threads = Threads(asyncio.get_running_loop(), 1)
    pool = Pool(threads, asyncio.get_running_loop())
    await fast_path(pool)
    await hand_over(threads, pool)
    for name in models:
        await throughput(pool, name, seconds)
    threads.close()


if __name__ == "__main__":
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of five measurements of each way")
    parser.add_argument("--models", nargs="+", default=["digits_cnn", "mnist5k_dscnn"])
    arguments = parser.parse_args()
    asyncio.run(main(arguments.seconds, arguments.models))
