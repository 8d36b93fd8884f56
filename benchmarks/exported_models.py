"""Small models as exporters write them, each through package, verify, serve and offload plan.

    scripts/python -m benchmarks.exported_models [--count 300] [--first 0] [--kind NAME] [--no-plan]

Model N is of kind N modulo their number (`exporter_kinds` of the tests), from seed N. Commands run in a
child process, so that an engine that aborts costs one model. Numbers are compared with onnxruntime on the
source without its optimiser. A refusal is vague if it names no tensor, operator or option. Ends with 1 if
anything but results and clear refusals came out.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnx
from benchmarks.results import make_parser, write_json
from tests.toolkit.exporter_kinds import KINDS, UNORDERED_ROWS, Array, build

from edgekit_cli.cli import main as edgekit
from edgekit_runtime.client import Client
from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.row_sets import row_similarity
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.config import Listen, ServiceConfig
from edgekit_runtime.service.server import Service
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore

ENGINES: Final = ("ort", "litert")
GOOD: Final = {"ok", "refused"}
PACKAGING: Final = ["-t", "x86-64", "--budget", "size=10MB,drop=3%", "--search-seconds", "0", "--json"]
PLANNING: Final = ["--device", "local", "--server", "local", "--bandwidth", "1,100", "--seconds", "0.2"]
_LIMIT_S: Final = 600.0
_CLEAR: Final = re.compile(r"'[^']+'|--[a-z]|node that makes")
_MAX_ERROR: Final = 0.5  # of the outputs' norm; int8 forms of random networks stay below 0.2


class Result(NamedTuple):
    """The outcome of one step with one model: `ok`, `refused`, or a fault."""

    number: int
    kind: str
    step: str
    outcome: str
    detail: str = ""


def run_command(*arguments: object) -> tuple[str, str]:
    """Run `edgekit ARGUMENTS`; return the outcome, and the standard output or the reason."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = edgekit([str(argument) for argument in arguments])
    if "Warning: " in err.getvalue():  # of Python or numpy, on the user's terminal
        return "noise", err.getvalue()
    if code == 0:
        return "ok", out.getvalue()
    reason = " ".join(err.getvalue().split())[-400:]
    return ("refused" if code == 5 or _CLEAR.search(reason) else "vague"), f"{code}: {reason}"


def feeds_of(samples: Mapping[str, Array], specs: Mapping[str, int], place: int) -> dict[str, Array]:
    return {
        name: array[place] if array.ndim > specs[name] else array[place : place + 1]
        for name, array in samples.items()
    }


def find_difference(
    expected: Mapping[str, Array], outputs: Mapping[str, Array], *, has_order: bool = True
) -> str:
    """Return how outputs differ from those of the source, or an empty text; numbers of rows may.

    Rows without an order are compared as sets: scores that nearly tie change their places.
    """
    for name, want in expected.items():
        got = outputs[name]
        if got.dtype != want.dtype or got.ndim != want.ndim:
            return f"'{name}' is {got.dtype} {got.shape}, of the source {want.dtype} {want.shape}"
        if not has_order:
            if (share := row_similarity(outputs, expected, {name: max(want.ndim - 2, 0)})[name]) < 0.5:
                return f"'{name}' is alike by {share:.2f}"
            continue
        if want.dtype.kind != "f" or got.shape != want.shape:
            continue
        finite = np.isfinite(want)
        if not np.array_equal(finite, np.isfinite(got)):
            return f"'{name}' is finite elsewhere than that of the source"
        error = np.linalg.norm((got[finite] - want[finite]).astype(np.float64))
        if error > _MAX_ERROR * np.linalg.norm(want[finite].astype(np.float64)) + 1e-6:
            return f"'{name}' has an error of {error:.3g}, its norm is {np.linalg.norm(want[finite]):.3g}"
    return ""


async def serve_once(package: Path, trust: TrustStore, name: str, feeds: Mapping[str, Array]) -> Any:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path must be short
        socket = f"{folder}/socket"
        config = ServiceConfig(listen=Listen(unix_socket=socket, port=0))
        service = Service(config, PackageFiles([package], trust))
        try:
            await service.listen()
            await service.registry.load_all()
            with Client(socket) as client:
                return await asyncio.to_thread(client.infer, name, feeds)
        finally:
            await service.stop()


class Trial:
    def __init__(self, number: int, folder: Path) -> None:
        self.number, self.folder = number, folder
        self.kind, proto, self.samples = build(number)
        self.path = folder / f"{self.kind}{number}.onnx"
        self.data = self.path.with_suffix(".npz")
        onnx.save(proto, self.path)
        np.savez(self.data, **self.samples)
        self.ranks = {value.name: len(value.type.tensor_type.shape.dim) for value in proto.graph.input}
        self._source = OrtSession(self.path.read_bytes(), OrtOptions(optimise=False))

    def results(self, *, engines: Sequence[str] = ENGINES, with_plan: bool = True) -> Iterator[Result]:
        for engine in engines:
            out = self.folder / engine
            made = self._step(f"package {engine}", lambda: self._package(engine, out))  # noqa: B023
            yield made
            for path in out.glob("*.edgepkg"):
                yield self._step(f"verify {engine}", lambda: run_command("verify", path))  # noqa: B023
                yield self._step(f"serve {engine}", lambda: self._serve(path))  # noqa: B023
        if with_plan:
            yield self._step("plan", self._plan)

    def _step(self, name: str, step: Callable[[], tuple[str, str]]) -> Result:
        try:
            outcome, detail = step()
        except EdgekitError as error:
            outcome, detail = "error", f"{type(error).__name__}: {error}"
        except Exception:  # a traceback is a fault, and is counted as one
            outcome, detail = "traceback", traceback.format_exc(limit=-3)
        return Result(self.number, self.kind, name, outcome, "" if outcome == "ok" else detail[-1200:])

    def _package(self, engine: str, out: Path) -> tuple[str, str]:
        outcome, detail = run_command(
            "package", self.path, "--backend", engine, "--calibration", self.data, "-o", out, *PACKAGING
        )
        if outcome == "ok":
            baseline = json.loads(detail)["accuracy"]["baseline"]
            if baseline != 1:
                return "wrong", f"the baseline of the model against itself is {baseline}"
        return outcome, detail

    def _serve(self, package: Path) -> tuple[str, str]:
        trust = TrustStore.from_folder(find_keys_folder())
        for place in range(3):
            feeds = feeds_of(self.samples, self.ranks, place)
            expected = self._source.run(feeds)
            with read_package(package, trust) as opened, contextlib.closing(open_session(opened)) as session:
                outputs = session.run(feeds)
                name = opened.manifest.name
            if difference := find_difference(expected, outputs, has_order=self.kind not in UNORDERED_ROWS):
                return "wrong", difference
        answer = asyncio.run(serve_once(package, trust, name, feeds))
        unlike = [name for name in outputs if not np.allclose(answer[name], outputs[name], 1e-4, 1e-5, True)]
        return ("wrong", f"the service answers something else for {unlike}") if unlike else ("ok", "")

    def _plan(self) -> tuple[str, str]:
        return run_command(
            "offload", "plan", self.path, "--samples", self.data, "-o", self.folder / "plan", *PLANNING
        )


def run_child(*, with_plan: bool) -> None:
    """Try the models whose numbers come in, a line each; answer with their results as lines of JSON."""
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            for result in Trial(int(line), Path(folder)).results(with_plan=with_plan):
                print(json.dumps(result), file=results, flush=True)
        print("null", file=results, flush=True)


class Child:
    """A child process that tries models; it is restarted after it dies."""

    def __init__(self, home: Path, *arguments: str) -> None:
        self._environment = {**os.environ, "EDGEKIT_HOME": str(home), "EDGEKIT_DEVICE_ENGINES": "off"}
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None

    def results(self, number: int) -> Iterator[Result]:
        """Yield the results of a model, the last of which may be the end of the process."""
        if self._process is None:
            command = [sys.executable, "-m", "benchmarks.exported_models", "--child", *self._arguments]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=self._environment,
            )
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        print(number, file=process.stdin, flush=True)
        previous = "none"
        while True:
            is_ready, _, _ = select.select([process.stdout], [], [], _LIMIT_S)
            line = process.stdout.readline() if is_ready else ""
            if not line:
                outcome = "abort" if is_ready else "hang"
                process.kill()
                kind = [*KINDS][number % len(KINDS)]
                yield Result(number, kind, f"after {previous}", outcome, f"exit code {process.wait()}")
                self._process = None
                return
            if line == "null\n":
                return
            result = Result(*json.loads(line))
            previous = result.step
            yield result

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--no-plan", dest="plan", action="store_false", help="leave out the slowest step")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(with_plan=options.plan)
        return 0
    names, results = [*KINDS], list[Result]()
    arguments = [] if options.plan else ["--no-plan"]
    numbers = range(options.first, options.first + options.count)
    with tempfile.TemporaryDirectory() as home, contextlib.closing(Child(Path(home), *arguments)) as child:
        for number in numbers:
            if options.kind not in {None, names[number % len(names)]}:
                continue
            for result in child.results(number):
                results.append(result)
                if result.outcome not in GOOD:
                    print(*result, sep=" | ", flush=True)
            write_json(options.json, results)
    show(results)
    return int(any(result.outcome not in GOOD for result in results))


def show(results: list[Result]) -> None:
    """Print a row for each step, and the refusals with how often they came."""
    for step in dict.fromkeys(result.step for result in results):
        counts = Counter(result.outcome for result in results if result.step == step)
        print(f"| {step} |", ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()), "|")
    refused = [result for result in results if result.outcome == "refused"]
    reasons = Counter((one.kind, one.step, re.sub(r"\S*\.onnx: |\d+", "", one.detail)) for one in refused)
    for (kind, step, reason), count in reasons.most_common():
        print(f"{count} x {kind}, {step}: {reason}")


if __name__ == "__main__":
    sys.exit(main())
