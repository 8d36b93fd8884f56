"""Samples from the field on devices: quota, rate and budget, what is lost, and what the service pays.

    scripts/python benchmarks/field_samples.py [--devices 1000] [--days 14] [--seconds 10] [--json FILE]

Simulated: time, requests, link (64 kbit/s, cut at random, answers lost) and manager. Real: the draws and
triggers, the sealed files with their shares of the disk, the decision to send, the protocol of uploads. Of
the devices, 20 % forbid samples from the start, 10 % from a day in between, 30 % have 1 MB a month, and 20 %
an order of 200 kB. A sample counts as lost if the device has deleted it without the manager having all of it.

Measured: the latency of a small model in three services, by blocks of requests in turn: without an order,
with one that draws, and with one that also remembers requests for applications.
"""

import base64
import json
import math
import os
import random
import statistics
import tempfile
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from tests.waiting import wait_for

from edgekit_runtime.agent.artifacts.upload import UploadReply, send_samples
from edgekit_runtime.agent.conditions import DeviceConditions
from edgekit_runtime.agent.execution.step_result import StepResult
from edgekit_runtime.agent.sample_uploads import SampleUploads
from edgekit_runtime.client.control import read_samples
from edgekit_runtime.client.requests import InferOptions, make_template
from edgekit_runtime.dataclass_json import to_plain
from edgekit_runtime.encryption.key_wrapping import encode_point
from edgekit_runtime.errors import TransportError
from edgekit_runtime.protocol.samples import SampleOrder, SampleTrigger
from edgekit_runtime.samples.draws import Draws
from edgekit_runtime.samples.folder import SAMPLES_FOLDER, SampleFolder
from edgekit_runtime.service.options.config import SampleOptions
from edgekit_runtime.service.samples.sampler import ModelSampler, Writer
from edgekit_toolkit.packaging.signing_keys import load_signer
from results import make_parser, write_json
from service_latency import HOST, pin, send_repeatedly, take_turns
from serving import INPUT, MODEL, SHAPE, serving, write_signed

HOUR_S = 3600.0
LINK_BYTES_S = 8000.0
PER_DAY = 10.0
REQUESTS_A_DAY = 96
CUT_SHARE = 0.05  # of requests over the link
POINT = encode_point(ec.generate_private_key(ec.SECP256R1()).public_key())


def make_order(model: str, triggers: tuple[SampleTrigger, ...], **changes: Any) -> SampleOrder:
    stated = {"max_bytes": 10_000_000, "ends_at": 1e11, "public_key": base64.b64encode(POINT).decode()}
    return SampleOrder(id="o-1", model=model, triggers=triggers, per_day=PER_DAY, **{**stated, **changes})


class Immediate(Writer):
    """Does each job at once; also the loop that learns of it."""

    def put(self, _size_bytes: int, job: Callable[[], None]) -> bool:
        job()
        return True

    def call_soon_threadsafe(self, function: Callable[..., None], *arguments: object) -> None:
        function(*arguments)


@dataclass
class Manager:
    """The fleet's side of a link that is slow and breaks."""

    chance: random.Random
    now_s: float = 0.0
    parts: dict[str, bytes] = field(default_factory=dict)
    durable: set[str] = field(default_factory=set)
    sent_bytes: int = 0

    def ask(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> UploadReply:
        sample_id, stretch = path.rpartition("/")[2], headers.get("Content-Range", "")
        is_cut, is_deaf = self.chance.random() < CUT_SHARE, self.chance.random() < CUT_SHARE
        body = body[: self.chance.randrange(len(body) + 1)] if is_cut else body
        self.now_s += 0.2 + len(body) / LINK_BYTES_S
        self.sent_bytes += len(body)
        if sample_id in self.durable:
            reply = UploadReply(201, None)
        elif method == "HEAD":
            size_bytes = len(self.parts.get(sample_id, b""))
            reply = UploadReply(204, size_bytes) if size_bytes else UploadReply(404, None)
        else:
            begin, size_bytes = (int(stretch[6:].split(mark)[index]) for mark, index in (("-", 0), ("/", 1)))
            if begin == len(self.parts.get(sample_id, b"")):
                self.parts[sample_id] = self.parts.get(sample_id, b"") + body
            is_whole = len(self.parts.get(sample_id, b"")) == size_bytes
            if is_whole:
                self.durable.add(sample_id)
                del self.parts[sample_id]
            offset = len(self.parts.get(sample_id, b""))
            reply = UploadReply(201, None) if is_whole else UploadReply(202 if body else 409, offset)
        if is_cut or is_deaf:
            raise TransportError("cut")
        return reply


def simulate(seed: int, days: int) -> dict[str, float]:
    """Return the figures of one device."""
    chance = random.Random(seed)  # noqa: S311  # a simulation
    kind = chance.random()
    forbidden_at_s = 0.0 if kind < 0.2 else chance.uniform(1, days) * 24 * HOUR_S if kind < 0.3 else math.inf
    max_bytes = 200_000 if 0.3 <= kind < 0.5 else 10_000_000
    budget_bytes = 1_000_000 if 0.5 <= kind < 0.8 else None
    triggers = tuple(SampleTrigger(kind=name) for name in ("random", "uncertain"))
    window = "01:00-05:00" if chance.random() < 0.5 else None
    order = make_order("m", triggers, max_bytes=max_bytes, window=window)
    manager, immediate = Manager(chance), Immediate()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        folder = SampleFolder(Path(path) / SAMPLES_FOLDER)
        draws = Draws(0.0, chance.random)
        sampler = ModelSampler(
            *("m", folder, SampleOptions(), immediate, immediate),  # type: ignore[arg-type]  # a loop of its own
            draws=draws,
            clock=lambda: manager.now_s,
        )
        sampler.set_orders((order,))
        uploads, written, waiting_bytes, sent_forbidden = SampleUploads(Path(path)), set(), 0, 0
        for hour in range(days * 24):
            manager.now_s = max(manager.now_s, hour * HOUR_S)
            is_forbidden = manager.now_s >= forbidden_at_s
            if is_forbidden:
                folder.clear()
            else:
                take_requests(sampler, chance, hour)
            samples = folder.list_samples()
            written |= {sample.id for sample in samples}
            waiting_bytes = max(waiting_bytes, sum(sample.size_bytes for sample in samples))
            left_bytes = None if budget_bytes is None else max(0, budget_bytes - manager.sent_bytes)
            conditions = DeviceConditions(
                now_s=manager.now_s, minute_of_day=hour % 24 * 60, budget_left_bytes=left_bytes
            )
            held = uploads.list_held((order,), conditions)
            before = manager.sent_bytes
            if uploads.may_send(manager.now_s, held, conditions, {"allowed": not is_forbidden}):
                try:
                    send_samples(
                        folder.list_samples(),
                        folder,
                        manager.ask,
                        stop=threading.Event(),
                        most_bytes=left_bytes,
                    )
                    uploads.note_end(StepResult(), manager.now_s)
                except TransportError:
                    uploads.note_end(StepResult(outcome="retry"), manager.now_s)
            sent_forbidden += manager.sent_bytes - before if is_forbidden else 0
            sampler.note_sizes(sum_sizes(folder))
        left = {sample.id for sample in folder.list_samples()}
    lost = 0 if forbidden_at_s < math.inf else len(written - left - manager.durable)
    free = forbidden_at_s == math.inf and max_bytes > 1_000_000 and budget_bytes is None
    return {
        "lost": lost,
        "durable": len(manager.durable),
        "sent_forbidden_bytes": sent_forbidden,
        "forbids": forbidden_at_s < math.inf,
        "quota": waiting_bytes / max_bytes,
        "budget": math.nan if budget_bytes is None else manager.sent_bytes / budget_bytes,
        "rate": len(written) / (PER_DAY * days) if free else math.nan,
    }


def take_requests(sampler: ModelSampler, chance: random.Random, hour: int) -> None:
    """Let an hour of requests come, more of them by day; each tenth is uncertain."""
    sampler.refresh()
    count = round(REQUESTS_A_DAY / 24 * (1 + 0.8 * math.sin(hour / 24 * 2 * math.pi)))
    for _ in range(count):
        pixels = np.frombuffer(os.urandom(64) * round(chance.lognormvariate(6.2, 0.5)), np.uint8)
        scores = (0.5, 0.45) if chance.random() < 0.1 else (0.9, 0.1)
        sampler.note(SERVED, {"x": pixels}, {"y": np.array([scores], np.float32)})


MANIFEST: Any = SimpleNamespace(
    name="m",
    version="1.0.0",
    sha256="0" * 64,
    states=(),
    figures={"class_output": "y"},
    outputs=(SimpleNamespace(name="y", dtype="float32", shape=("N", 2)),),
)
SERVED: Any = SimpleNamespace(
    loaded=SimpleNamespace(manifest=MANIFEST, answerer=None, instances=()), trial=None
)


def sum_sizes(folder: SampleFolder) -> dict[tuple[str, str], int]:
    sizes: dict[tuple[str, str], int] = {}
    for sample in folder.list_samples():
        sizes[sample.share] = sizes.get(sample.share, 0) + sample.size_bytes
    return sizes


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--days", type=int, default=14)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=10.0, help="of the measurement of latency")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.processes) as executor:
        devices = list(
            executor.map(partial(simulate, days=arguments.days), range(arguments.devices), chunksize=10)
        )
    rates = [device["rate"] for device in devices if not math.isnan(device["rate"])]
    budgets = [device["budget"] for device in devices if not math.isnan(device["budget"])]
    results: dict[str, Any] = {
        "devices": len(devices),
        "forbid": sum(device["forbids"] for device in devices),
        "durable": sum(device["durable"] for device in devices),
        "lost": sum(device["lost"] for device in devices),
        "sent_forbidden_bytes": sum(device["sent_forbidden_bytes"] for device in devices),
        "quota_most": max(device["quota"] for device in devices),
        "budget_most": max(budgets, default=0.0),
        "budget_mean": statistics.mean(budgets or [0.0]),
        "rate_mean": statistics.mean(rates or [0.0]),
        "rate_most": max(rates, default=0.0),
        "latency_us": measure_service(arguments.seconds),
    }
    for name, value in results.items():
        print(f"{name}: {value}")
    write_json(arguments.json, results)


def measure_service(seconds: float) -> dict[str, dict[str, float]]:
    """Return the latency of a small model in microseconds: of three services, blocks of requests in turn."""
    ways = {"off": (), "draws": ("random", "uncertain", "drift"), "remembers": ("random", "kept")}
    x: Any = np.random.default_rng(1).random(SHAPE, np.float32)
    with ExitStack() as stack:
        calls = {}
        for name, kinds in ways.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sign = load_signer(folder=folder / "keys")
            package = write_signed(folder, "small", MODEL.read_bytes(), {INPUT: x}, sign)
            triggers = tuple(SampleTrigger(kind=kind) for kind in kinds)
            orders = [to_plain(make_order("small", triggers))] if triggers else []
            (folder / "samples.json").write_text(json.dumps({"orders": orders}))
            config = f'[samples]\nfile = "{folder}/samples.json"\n'
            service = stack.enter_context(serving(folder, package, config=config))
            pin(service.pid)
            if triggers:
                wait_for(lambda path=Path(service.path): read_samples(path).get("orders"), "the order")
            options = InferOptions("small", None, 0, 10.0)
            request = make_template(options, {INPUT: x}, [None], (), HOST).start + x.tobytes()
            calls[name] = send_repeatedly(stack, service.path, request)
        times = take_turns(calls, seconds)
    return {
        name: {
            "p50": round(float(np.percentile(values, 50)), 2),
            "p99": round(float(np.percentile(values, 99)), 2),
        }
        for name, values in times.items()
    }


if __name__ == "__main__":
    main()
