"""What `edgekit package` chooses beside the best of each engine's own tools: latency, at a drop of a point.

    python benchmarks/engine_peers.py [--only NAME ...] [--without-vnni]     # a Python with OpenVINO

Tools: onnxruntime's quantize_static, ai-edge-quantizer, NNCF, and float32 of onnxruntime, LiteRT, OpenVINO
and ncnn, each with one thread and with all cores. Those that lose more than a point of the float model's
score on the evaluation samples take no part. Peers run on the bare engine; the package by edgekit's session,
which checks inputs, and its model on the bare engine too. Each is a process of its own; they take turns, and
the others are stopped. The first decile of each one's turns counts: other work only adds time. OpenVINO's
float models run as it does by default, in bfloat16 where the processor has that. LiteRT's peers are converted
by edgekit: LiteRT has no tool for ONNX. Models and packages are kept in `benchmarks/.cache/engine_peers`;
`--fresh` makes the packages again.

`--without-vnni` hides AVX-512 and VNNI from all engines (`hidden_vnni.py`) and packages for x86-64-avx2.
"""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np

from compression_peers import convert_for_litert
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.system.engines import find_engine
from edgekit_runtime.trust.trust_store import TrustStore
from environments import make_environment
from hidden_vnni import hide_vnni
from judging import Judge, open_model, read_arrays
from public_models import CACHE
from results import NONE, machine, make_parser, print_head, print_row, write_json
from works import HERE, Subject, list_subjects

CORES: Final = len(os.sched_getaffinity(0))
MAX_DROP: Final = 0.01
FOLDER: Final = CACHE / "engine_peers"
_TRIAL_ROUNDS: Final = 16
_BATCH_S: Final = 0.0015  # less than a slice of the scheduler, so that most turns are undisturbed
PACKAGES: Final = (
    "nncf==3.4.0",
    "ncnn==1.0.20261020",
    "pnnx==20261020",
    *(f"{name}=={version(name)}" for name in ("openvino", "onnxruntime", "ai-edge-litert", "numpy")),
)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A way of an engine's own tool to write a model.

    Attributes:
        script: in `peers`, with `options`; none copies the source.
        reads, writes: suffixes of the models.
        is_ours: whether the script runs with the packages of this environment.
    """

    engine: str
    form: str
    script: str = ""
    options: tuple[str, ...] = ()
    reads: str = ".onnx"
    writes: str = ".onnx"
    is_ours: bool = False

    @property
    def file_name(self) -> str:
        return f"{self.engine} {self.form}{self.writes}".replace(" ", "_")


ENGINES: Final = ("onnxruntime", "LiteRT", "OpenVINO", "ncnn")
DEFAULT_THREADS: Final = {"LiteRT": 1}  # the others take all cores
FLOAT: Final = "float32"
TOOLS: Final = (
    Tool(engine="onnxruntime", form=FLOAT),
    *(
        Tool(engine="onnxruntime", form=form, script="ort_static.py", options=options, is_ours=True)
        for form, options in {
            "int8": (),
            "int8 per channel": ("--per-channel", "MinMax"),
            "int8 percentile": ("--per-channel", "Percentile"),
            "7 bits": ("--per-channel", "MinMax", "--reduce-range"),
        }.items()
    ),
    Tool(engine="LiteRT", form=FLOAT, reads=".tflite", writes=".tflite"),
    *(
        Tool(
            engine="LiteRT",
            form=form,
            script="ai_edge_static.py",
            options=options,
            reads=".tflite",
            writes=".tflite",
            is_ours=True,
        )
        for form, options in {
            "int8": ("--float-io",),
            "int8 dynamic": ("--dynamic",),
        }.items()
    ),
    *(
        Tool(engine="OpenVINO", form=form, script="nncf_static.py", options=options, writes=".xml")
        for form, options in {
            FLOAT: (),
            "int8": ("--preset", "performance"),
            "int8 mixed": ("--preset", "mixed"),
        }.items()
    ),
    Tool(engine="ncnn", form=FLOAT, script="ncnn_convert.py", writes=".param"),
)


class Runner:
    """A process with one model, stopped but for its turns: its threads do not spin in those of others."""

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def wait_ready(self) -> bool:
        assert self._process.stdout is not None
        is_ready = self._process.stdout.readline().strip() == "ready"
        if is_ready:
            self._process.send_signal(signal.SIGSTOP)
        return is_ready

    def run(self, seconds: float) -> float:
        """Return the mean seconds of an inference over a batch of about `seconds`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        mean_s = float(self._process.stdout.readline())
        self._process.send_signal(signal.SIGSTOP)
        return mean_s

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@dataclass(kw_only=True)
class Candidate:
    """A model on an engine with a number of threads.

    Attributes:
        engine: as `run_engine.py` calls it.
        seconds: mean of an inference in each turn.
    """

    engine: str
    form: str
    path: Path
    threads: int
    seconds: list[float] = field(default_factory=list)

    @property
    def typical_s(self) -> float:
        """The first decile: other work on the machine only adds time."""
        return float(np.quantile(self.seconds, 0.1))

    @property
    def has_default_threads(self) -> bool:
        return self.threads == DEFAULT_THREADS.get(self.engine, CORES)

    def describe(self) -> str:
        return f"{1e3 * self.typical_s:.3f}: {self.form}, {self.threads}"

    def ratio_to(self, peers: Sequence["Candidate"]) -> float:
        return self.typical_s / min((peer.typical_s for peer in peers), default=math.nan)


@dataclass(kw_only=True)
class Comparison:
    """The package beside the peers that keep the score; ratios below 1 say that it is faster.

    Attributes:
        model: the package's model on the bare engine.
        package: by edgekit's session.
        drop: share of the samples that the package loses.
        best: engine -> its fastest candidate.
        ratios: of the package and of its model over the best peer, then of the model over the best peer that
            leaves its engine the usual threads, and over the best float32.
    """

    HEADS: ClassVar = (
        "model",
        "edgekit, ms: form, threads",
        "drop, points",
        "session, ms",
        *ENGINES,
        "x best peer",
        "by the session",
        "x best with usual threads",
        "x best float32",
    )

    name: str
    model: Candidate
    package: Candidate
    drop: float
    best: dict[str, Candidate]
    ratios: tuple[float, ...]

    def cells(self) -> list[object]:
        """Return the cells of its row below `HEADS`."""
        engines = [self.best[name].describe() if name in self.best else NONE for name in ENGINES]
        ours = (f"{self.model.engine} {self.model.describe()}", f"{100 * self.drop:.1f}")
        session = f"{1e3 * self.package.typical_s:.3f}"
        return [self.name, *ours, session, *engines, *(f"{ratio:.2f}" for ratio in self.ratios)]


class Bench:
    """Makes, scores and times all candidates of a model.

    Attributes:
        target: of the package.
        environment: of all processes that run an engine.
    """

    def __init__(self, peers_python: Path, *, without_vnni: bool) -> None:
        self._peers_python = peers_python
        self.target = "x86-64-avx2" if without_vnni else "x86-64"
        self.environment = dict(os.environ, EDGEKIT_HOME=str(FOLDER / "home"))
        if without_vnni:
            self.environment |= hide_vnni(FOLDER / "hidden")

    def compare(self, subject: Subject, *, rounds: int, fresh: bool) -> Comparison:
        folder = FOLDER / subject.name
        folder.mkdir(parents=True, exist_ok=True)
        package, model = self._package(subject, folder / self.target, fresh=fresh)
        tools = dict(self._make_peers(subject, folder))
        files = {package.path: "package", **{path: tool.engine for tool, path in tools.items()}}
        drops = self._find_drops(subject, files, folder / f"{self.target}.json")
        peers = [
            Candidate(engine=tool.engine, form=tool.form, path=path, threads=threads)
            for tool, path in tools.items()
            if drops.get(path.name, math.inf) <= MAX_DROP + 1e-9
            for threads in sorted({1, CORES})
        ]
        self._time(subject, [package, model, *peers], rounds)
        peers = [peer for peer in peers if peer.seconds]
        best = {
            engine: min((peer for peer in peers if peer.engine == engine), key=lambda peer: peer.typical_s)
            for engine in {peer.engine for peer in peers}
        }
        ratios = (
            model.ratio_to(peers),
            package.ratio_to(peers),
            model.ratio_to([peer for peer in peers if peer.has_default_threads]),
            model.ratio_to([peer for peer in peers if peer.form == FLOAT]),
        )
        drop = drops[package.path.name]
        return Comparison(
            name=subject.name, model=model, package=package, drop=drop, best=best, ratios=ratios
        )

    def _package(self, subject: Subject, folder: Path, *, fresh: bool) -> tuple[Candidate, Candidate]:
        """Return the package, and its model."""
        report_path = folder / "report.json"
        if fresh and folder.exists():
            shutil.rmtree(folder)
        if not report_path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            metric = _metric(subject)
            if metric not in ("top1", "agreement"):
                metric = f"{HERE / 'metrics.py'}:{metric}"
            command = [sys.executable, "-m", "edgekit_cli", "package", str(subject.model), "-t", self.target]
            command += [*subject.options, "--metric", metric, "-b", f"size=1GB,drop={MAX_DROP:.0%}"]
            command += ["--search-seconds", "4", "-o", str(folder), "--json"]
            made = subprocess.run(command, capture_output=True, text=True, env=self.environment, check=False)
            if made.returncode:
                sys.exit(f"{subject.name}: {made.stderr[-2000:]}")
            report_path.write_text(made.stdout)
        report = json.loads(report_path.read_text())
        form = next(candidate["label"] for candidate in report["candidates"] if candidate["chosen"])
        threads = next(row["threads"] for row in report["tournament"] if row["kept"])
        (path,) = folder.glob("*.edgepkg")
        with read_package(path, TrustStore.from_folder(FOLDER / "home" / "keys")) as package:
            choice = package.manifest.backend
            model = folder / Path(choice.artifact).name
            model.write_bytes(package.read(choice.artifact))
        return (
            Candidate(engine="package", form=form, path=path, threads=threads),
            Candidate(engine=find_engine(choice.name).title, form=form, path=model, threads=threads),
        )

    def _make_peers(self, subject: Subject, folder: Path) -> Iterator[tuple[Tool, Path]]:
        sources = {".onnx": subject.model, ".tflite": folder / "source.tflite"}
        if not sources[".tflite"].exists():
            convert_for_litert(subject, sources[".tflite"])
        for tool in TOOLS:
            path = folder / tool.file_name
            refusal = path.with_suffix(".refused")
            if not path.exists() and not refusal.exists():
                source = sources[tool.reads]
                if not tool.script:
                    shutil.copy(source, path)
                else:
                    python = Path(sys.executable) if tool.is_ours else self._peers_python
                    command = [python, HERE / "peers" / tool.script, source, subject.calibration, path]
                    made = subprocess.run([*command, *tool.options], capture_output=True, check=False)
                    if made.returncode:
                        path.unlink(missing_ok=True)
                        refusal.write_bytes(made.stderr)
            if path.exists():
                yield tool, path
            else:
                print(f"{path.name}: {refusal.read_text().strip()[-200:]}", file=sys.stderr)

    def _find_drops(self, subject: Subject, files: Mapping[Path, str], cache: Path) -> dict[str, float]:
        """Return file name -> drop in score against the float model, for the files that run.

        `files`: path -> engine.
        """
        drops: dict[str, float] = json.loads(cache.read_text()) if cache.exists() else {}
        drops = {name: drop for name, drop in drops.items() if not name.endswith(".edgepkg")}
        source = open_model(subject.model)
        judge = Judge(read_arrays(subject.evaluation), _metric(subject), source)
        baseline = judge.score(source)
        for path, engine in files.items():
            if path.name in drops:
                continue
            outputs = path.parent / "outputs.npz"
            command = [*self._runner(engine, path, subject), "--outputs", outputs]
            ran = subprocess.run(command, capture_output=True, env=self.environment, check=False)
            if ran.returncode == 0:
                with np.load(outputs) as data:
                    drops[path.name] = baseline - judge.score_outputs(dict(data))
                outputs.unlink()
            else:
                print(f"{path.name}: does not run ({ran.returncode})", file=sys.stderr)
        cache.write_text(json.dumps(drops))
        return drops

    def _runner(self, engine: str, path: Path, subject: Subject, threads: int = 1) -> list[str | Path]:
        python = Path(sys.executable) if engine == "package" else self._peers_python
        script = HERE / "peers" / "run_engine.py"
        return [python, script, engine, path, subject.evaluation, "--threads", str(threads)]

    def _time(self, subject: Subject, candidates: Sequence[Candidate], rounds: int) -> None:
        """Let all take turns in random order; peers of three times the fastest's time have few.

        The first two candidates are ours.
        """
        orders = np.random.default_rng(0)
        with ExitStack() as stack:
            runners = []
            for candidate in candidates:
                command = self._runner(candidate.engine, candidate.path, subject, candidate.threads)
                runner = Runner(command, self.environment)
                stack.callback(runner.close)
                if runner.wait_ready():
                    runners.append((candidate, runner))
            for count in range(rounds):
                if count == _TRIAL_ROUNDS:
                    limit_s = 3 * min(candidate.typical_s for candidate, _ in runners)
                    runners = [
                        (candidate, runner)
                        for candidate, runner in runners
                        if candidate in candidates[:2] or candidate.typical_s <= limit_s
                    ]
                for index in orders.permutation(len(runners)):
                    candidate, runner = runners[index]
                    candidate.seconds.append(runner.run(_BATCH_S))


def _metric(subject: Subject) -> str:
    return "top1" if subject.work is None else subject.work.metric


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--without-vnni", action="store_true")
    parser.add_argument("--fresh", action="store_true", help="make the packages again")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    python = make_environment("engine_peers", PACKAGES, "3 GB")
    if python is None:
        sys.exit("pip cannot make the environment of the peers")
    bench = Bench(python, without_vnni=options.without_vnni)
    host, comparisons = machine(), []
    print(host)
    print_head(*Comparison.HEADS)
    for subject in list_subjects(options.only):
        comparison = bench.compare(subject, rounds=options.rounds, fresh=options.fresh)
        comparisons.append(comparison)
        print_row(*comparison.cells())
        rows: list[dict[str, Any]] = [asdict(row) for row in comparisons]
        write_json(options.json, json.loads(json.dumps({"machine": host, "rows": rows}, default=str)))
    columns = dict(
        zip(Comparison.HEADS[-4:], zip(*(row.ratios for row in comparisons), strict=True), strict=True)
    )
    for engine in ENGINES:
        ratios = (row.model.ratio_to([row.best[engine]]) for row in comparisons if engine in row.best)
        columns[f"x best of {engine} alone"] = tuple(ratios)
    for title, ratios in columns.items():
        if ratios:
            mean = math.exp(statistics.mean(map(math.log, ratios)))
            print(f"{title}: geometric mean {mean:.2f} of {len(ratios)}, worst {max(ratios):.2f}")
    print(f"{len(comparisons)} models, load at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
