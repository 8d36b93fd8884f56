"""Power cuts on a real ext4 on a block device: one run is recorded, any instant of it is replayed.

    scripts/python -m benchmarks.power_cuts [--cuts 20000]

Needs root, /dev/fuse, loop devices and qemu-storage-daemon (apt-get install qemu-utils). Three runs:

- `slots`: install, begin, confirm, reject, pin and roll back versions of a model.
- `download and install`, `delta and install`: an agent and its processes update a model from a real
  repository over HTTPS; journal, TUF metadata, downloads and slots are on the disk.

At each cut the device keeps what was written before the last flush, and of the later writes none, all, some,
or the first sectors of some. Each such disk is mounted, and a fresh process must start a whole signed version
that was allowed at that instant; one device in `--finish-every` must then reach the newest version.

`--leave-out` is the negative control: without these syncs there must be bad cuts. With `--folder` the
recordings and results are kept there, and the command goes on where it was interrupted.
"""

import argparse
import json
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import make_parser, write_json
from tests.faults.processes import end_with
from tests.hil.power_cut_runs import LEFT_OUT, Run, leave_out, make_runs
from tests.hil.power_cuts.cuts import KINDS, Cut, find_flushes, pick_writes, plan_cuts
from tests.hil.power_cuts.mounts import enter_private_memory, find_obstacle
from tests.hil.power_cuts.recording import Recording, record
from tests.hil.power_cuts.replay import Replay

SHARES = {"slots": 0.5, "download and install": 0.25, "delta and install": 0.25}
BATCH = 50
MEMORY_BYTES = 1 << 30  # at most; a disk takes some 10 MB of it


@dataclass
class Found:
    """What came of the cuts of one run.

    Attributes:
        counts: kind -> cuts.
        mended: file systems that e2fsck had to repair first.
        finished: devices that were led to the newest version.
        bad: what was wrong, a text each.
    """

    counts: Counter[str] = field(default_factory=Counter)
    mended: int = 0
    finished: int = 0
    bad: list[str] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        self.counts.update(line["counts"])
        self.mended += line["mended"]
        self.finished += line["finished"]
        self.bad += line["bad"]


@dataclass(frozen=True)
class Trial:
    """The cuts of one run."""

    name: str
    run: Run
    recording: Recording
    cuts: list[Cut]
    finish_every: int

    def try_batch(self, replay: Replay, begin: int) -> dict[str, Any]:
        """Return what came of the cuts from number `begin` on."""
        found, mended = Found(), replay.mended
        for number, cut in enumerate(self.cuts[begin : begin + BATCH], begin):
            found.counts[cut.kind] += 1
            step, allowed = self.recording.find_allowed(cut.at)
            try:
                with replay.mounted(cut) as root:
                    version = self.run.start(root)
                    problems = [] if version in allowed else [f"starts {version}, allowed {allowed}"]
                    if number % self.finish_every == 0:
                        found.finished += 1
                        problems += self.run.finish(root)
            except Exception as error:  # also those of the device's code are what we look for
                problems = [f"{type(error).__name__}: {error}"]
            found.bad += [f"{self.name}: {step}: {cut}: {problem}" for problem in problems]
        found.mended = replay.mended - mended
        return {"run": self.name, "begin": begin, **vars(found)}

    def describe(self) -> Counter[str]:
        """Return figures of the recording, and how many different disks the cuts leave."""
        entries = self.recording.entries
        flushes, begin = find_flushes(entries), self.recording.marks[0].begin
        disks = set()
        for cut in self.cuts:
            durable, kept = pick_writes(entries, flushes, cut)
            disks.add((durable, tuple(kept)))
        return Counter(
            {
                "steps": len(self.recording.marks),
                "writes": sum(not entry.is_flush for entry in entries[begin:]),
                "flushes": sum(number >= begin for number in flushes),
                "disks": len(disks),
            }
        )


def work(trial: Trial, begins: list[int], folder: Path, results: Any, parent: int) -> None:
    """Try batches, and put what came of each; None at the end."""
    end_with(parent)
    logging.disable(logging.CRITICAL)
    try:
        folder.mkdir()
        replay = Replay(trial.recording, folder)
        for begin in begins:
            results.put(trial.try_batch(replay, begin))
        replay.close()
    finally:
        results.put(None)


def try_all(trial: Trial, done: set[int], folder: Path, workers: int) -> Iterator[dict[str, Any]]:
    """Yield what came of each batch that is not done yet."""
    left = [begin for begin in range(0, len(trial.cuts), BATCH) if begin not in done]
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    running = [
        context.Process(
            target=work,
            args=(trial, left[n::workers], folder / f"worker-{n}", results, os.getpid()),
        )
        for n in range(workers)
    ]
    for process in running:
        process.start()
    ended = 0
    while ended < workers:
        if (line := results.get()) is None:
            ended += 1
        else:
            yield line
    for process in running:
        process.join()
        assert process.exitcode == 0, "a worker has ended: its error is above"


def print_table(found: dict[str, Found], figures: dict[str, Counter[str]]) -> None:
    heads = ("steps", "writes", "flushes", "disks")
    print(f"\n{'':24}" + "".join(f"{head:>10}" for head in (*heads, *KINDS, "mended", "finished", "bad")))
    for name, one in found.items():
        cells = [figures[name][head] for head in heads] + [one.counts[kind] for kind in KINDS]
        cells += [one.mended, one.finished, len(one.bad)]
        print(f"{name:24}" + "".join(f"{cell:10}" for cell in cells))
    for line in [line for one in found.values() for line in one.bad][:10]:
        print(line)


def read_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--cuts", type=int, default=20_000, help="of all runs; those at flushes are never fewer"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--run", choices=list(SHARES), help="this one only")
    parser.add_argument("--leave-out", choices=LEFT_OUT, help="negative control: forget these syncs")
    parser.add_argument("--one-in", type=int, default=1, metavar="N", help="try every Nth cut only")
    parser.add_argument("--finish-every", type=int, default=50, metavar="N")
    parser.add_argument("--recordings", type=int, default=4, help="of each run; no two are the same")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, help="keep recordings and results here, and go on with them")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def try_run(name: str, run: Run, memory: Path, arguments: argparse.Namespace) -> tuple[Found, Counter[str]]:
    """Return what came of the cuts of all recordings of one run, and figures of these."""
    found, figures = Found(), Counter()
    share = 1.0 if arguments.run else SHARES[name]
    for number in range(arguments.recordings):
        label = f"{name.replace(' ', '-')}-{number}"
        kept = arguments.folder and arguments.folder / label
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            recording = load_or_record(run, Path(folder), kept, arguments.leave_out)
            begin, seed = recording.marks[0].begin, arguments.seed * 1000 + number
            cuts = plan_cuts(
                recording.entries, begin, int(arguments.cuts * share / arguments.recordings), seed
            )[:: arguments.one_in]
            trial = Trial(name, run, recording, cuts, arguments.finish_every)
            add_results(
                found,
                trial,
                kept and kept / f"seed-{seed}-{len(cuts)}.jsonl",
                Path(folder),
                arguments.workers,
            )
            figures.update(trial.describe())
    return found, figures


def load_or_record(run: Run, folder: Path, kept: Path | None, leaves_out: str | None) -> Recording:
    if kept and (kept / "recording.json").exists():
        return Recording.load(kept)
    with leave_out(leaves_out):
        recording = record(folder, run.prepare)
    if kept:
        recording.save(kept)
    return recording


def add_results(found: Found, trial: Trial, kept: Path | None, folder: Path, workers: int) -> None:
    """Try the cuts that have no result yet, and add the results of all."""
    text = kept.read_text() if kept and kept.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    if kept:
        kept.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for line in lines:
        found.add(line)
    for line in try_all(trial, {line["begin"] for line in lines}, folder, workers):
        found.add(line)
        if kept:
            with kept.open("a") as file:
                file.write(f"{json.dumps(line)}\n")


def main() -> int:
    arguments = read_arguments()
    if obstacle := find_obstacle():
        sys.exit(obstacle)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    memory, begin_s = enter_private_memory(MEMORY_BYTES), time.monotonic()
    names = [arguments.run] if arguments.run else list(SHARES)
    found, figures = {}, {}
    with make_runs(memory, with_agent=names != ["slots"]) as runs:
        for name in names:
            found[name], figures[name] = try_run(name, runs[name], memory, arguments)
    took_s = time.monotonic() - begin_s
    print_table(found, figures)
    cuts, bad = sum(one.counts.total() for one in found.values()), sum(len(one.bad) for one in found.values())
    print(f"\n{cuts} power cuts in {took_s:.0f} s, {bad} bad; seed {arguments.seed}")
    runs_found = {
        name: {**figures[name], "counts": one.counts, "mended": one.mended, "finished": one.finished}
        for name, one in found.items()
    }
    lines = [line for one in found.values() for line in one.bad]
    body = {"cuts": cuts, "seconds": took_s, "seed": arguments.seed, "runs": runs_found, "bad": lines}
    write_json(arguments.json, body)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
