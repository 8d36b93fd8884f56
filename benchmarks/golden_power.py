"""How much of what is wrong with a package its self-test notices.

Each form of eight models is packaged, corrupted in about thirty ways and signed again. The true loss is
counted on labelled samples. A corruption that loses over 5 points must fail the self-test; the sound package
must pass it. `engine_releases.py` looks for false alarms of other engines.

    scripts/python benchmarks/golden_power.py
        [--only NAME ...] [--engines ort litert] [--samples 150] [--times-only] [--json FILE]
"""

import os
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekit_runtime.errors import EdgekitError
from edgekit_runtime.package.archive import read_package, write_package
from edgekit_runtime.sessions import open_session
from edgekit_runtime.sessions.selftest import read_golden, run_selftest
from edgekit_runtime.sessions.session import Session
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.engines.record import find_support
from edgekit_toolkit.packaging.assemble import PackageDraft, assemble, describe_artifacts
from edgekit_toolkit.packaging.recipe import Recipe
from edgekit_toolkit.packaging.signing_keys import StatementSigner, load_signer
from edgekit_toolkit.pipeline.candidates import find_candidates
from edgekit_toolkit.pipeline.prepare import prepare
from edgekit_toolkit.pipeline.request import Phases, Request
from edgekit_toolkit.samples.split import feeds_only
from edgekit_toolkit.selection.budget import parse_budget
from edgekit_toolkit.targets.loader import load_target
from golden_corruptions import corruptions
from results import make_parser, print_head, write_json
from works import Subject, list_subjects

LOSS = 0.05
SEARCH_S = 3.0
WITH_SAMPLES = ("resnet8", "dscnn", "vww")

Samples = tuple[list[dict[str, NDArray[Any]]], NDArray[Any]]


class Trial(NamedTuple):
    """A corruption: its kind, the points it loses as a share, and whether the self-test failed."""

    form: str
    kind: str
    loss: float
    caught: bool


def packages(source: Subject, backend: str) -> Iterator[tuple[str, PackageDraft]]:
    """Yield label and package of each form that `edgekit package` builds for a model and an engine."""
    target = load_target("x86-64")
    request = Request(
        model=source.model,
        target=target,
        budget=parse_budget(""),
        name=source.name,
        version="1",
        calibration=source.calibration,
        evaluation=source.evaluation,
        threads=1,
        backend=backend,
    )
    prepared = prepare(request, Phases(lambda *_: None))
    quantizer = find_support(backend).maker.open_quantizer(
        prepared.floats, target, threads=1, dims=prepared.dims, feeds=prepared.feeds
    )
    made = find_candidates(
        quantizer,
        lambda: feeds_only(prepared.samples.calibration),
        per_channel=True,
        kinds=find_support(backend).kinds,
        dims=prepared.dims,
        limit_s=SEARCH_S,
        progress=lambda *_: None,
    )
    for place, candidate in enumerate(made.candidates):
        recipe = Recipe(
            name=f"{source.name}-{backend}-{place}",
            version="1",
            target=target.name,
            backend=backend,
            source_sha256=prepared.source.sha256,
            batch=None,
            dims=prepared.dims,
            steps=(),
            form=candidate.form,
            model_sha256="",
            golden_seed=0,
            golden_ranges=prepared.ranges,
            golden_rows=tuple(prepared.golden.rows),
            budget={},
            figures={},
            labels=None,
            preprocessing=None,
            tools={},
        )
        yield candidate.label, assemble(recipe, prepared.golden, candidate.model)


class Signed:
    def __init__(self, package: PackageDraft, folder: Path, signer: StatementSigner) -> None:
        self._package, self._signer = package, signer
        self._trust = TrustStore.from_folder(find_keys_folder())
        self.path = folder / package.manifest.file_name

    def test(
        self, samples: Samples, content: bytes | None = None, *, saturating: bool = False
    ) -> tuple[float, bool]:
        """Return accuracy and verdict of the self-test of the package.

        Args:
            samples: labelled samples.
            content: another model, or None for its own. One that cannot be opened is caught, and has no
                accuracy.
            saturating: whether 8-bit products saturate, as by default on x86-64 without VNNI.
        """
        package = self._package
        artifacts, path = dict(package.artifacts), package.manifest.backend.artifact
        if content is not None:
            artifacts[path] = content
        roles = {artifact.path: artifact.role for artifact in package.manifest.artifacts}
        backend = package.manifest.backend
        if saturating:
            backend = replace(backend, options={**backend.options, "optimise": False})
        manifest = replace(package.manifest, artifacts=describe_artifacts(artifacts, roles), backend=backend)
        self.path.unlink(missing_ok=True)
        write_package(self.path, manifest, artifacts, self._signer)
        with read_package(self.path, self._trust) as opened:
            try:
                session = open_session(opened, threads=1)
                passed = run_selftest(session, opened).passed
                return accuracy(session, samples), passed
            except EdgekitError:
                return 0.0, False

    def time_ratio(self, repeats: int = 15) -> float:
        """Return the least processor time of reading, opening and testing over that with one row."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for _, has_rows in product(range(repeats), seconds):
            begin = time.process_time()
            with read_package(self.path, self._trust) as opened:
                golden = read_golden(opened)
                (golden if has_rows else replace(golden, rows=())).check(open_session(opened, threads=1))
            seconds[has_rows].append(time.process_time() - begin)
        return min(seconds[True]) / min(seconds[False])


def accuracy(session: Session, samples: Samples) -> float:
    outputs = [next(iter(session.run(feeds).values())) for feeds in samples[0]]
    return float(
        np.mean(
            [output.reshape(-1).argmax() == label for output, label in zip(outputs, samples[1], strict=True)]
        )
    )


def read_samples(path: Path, count: int) -> Samples:
    """Return some labelled samples, always the same ones."""
    with np.load(path) as data:
        arrays = {name: data[name] for name in data.files}
    labels = arrays.pop("y")
    chosen = np.random.default_rng(0).permutation(len(labels))[:count]
    return [{name: array[place : place + 1] for name, array in arrays.items()} for place in chosen], labels[
        chosen
    ]


def try_form(
    label: str, package: PackageDraft, signed: Signed, samples: Samples, *, seed: int
) -> list[Trial]:
    """Return the corruptions of one form that leave a model that runs, and leave the sound package behind."""
    model = package.manifest.backend
    sound, passed = signed.test(samples)
    if not passed:
        raise RuntimeError(f"{signed.path.name}: the sound package fails its self-test")
    trials = []
    generator = np.random.default_rng([seed, zlib.crc32(signed.path.name.encode())])
    classes = package.manifest.outputs[0].shape[-1]
    for kind, content in corruptions(package.artifacts[model.artifact], model.name, int(classes), generator):
        value, passed = signed.test(samples, content)
        trials.append(Trial(label, kind, sound - value, not passed))
    if model.name == "ort" and label.startswith("int8 per"):
        value, passed = signed.test(samples, saturating=True)
        trials.append(Trial(label, "saturating products", sound - value, not passed))
    signed.test(samples)
    return trials


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--engines", nargs="*", default=["ort", "litert"])
    parser.add_argument("--samples", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0, help="chooses layers, channels and classes")
    parser.add_argument("--times-only", action="store_true", help="make no corruptions")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    trials: dict[str, list[Trial]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["EDGEKIT_HOME"] = folder
        signer = load_signer()
        print_head(
            "model, engine | forms | corruptions | lose over 5 points | missed | caught of all | time ratio"
        )
        for source in list_subjects(arguments.only):
            if source.work is not None and source.name not in WITH_SAMPLES:
                continue
            samples = read_samples(source.evaluation, arguments.samples)
            for backend in arguments.engines:
                key, ratios, forms = f"{source.name}, {backend}", [], 0
                trials[key] = []
                for label, package in packages(source, backend):
                    signed = Signed(package, Path(folder), signer)
                    if arguments.times_only:
                        signed.test(samples)
                    else:
                        trials[key] += try_form(label, package, signed, samples, seed=arguments.seed)
                    ratios.append(signed.time_ratio())
                    forms += 1
                bad = [trial for trial in trials[key] if trial.loss > LOSS]
                missed = sum(not trial.caught for trial in bad)
                caught = sum(trial.caught for trial in trials[key])
                print(
                    f"| {key} | {forms} | {len(trials[key])} | {len(bad)} | {missed} | {caught} |"
                    f" {np.median(ratios):.2f} (at most {max(ratios):.2f}) |",
                    flush=True,
                )
        print_missed(trials)
    write_json(arguments.json, trials)


def print_missed(trials: dict[str, list[Trial]]) -> None:
    """Print the sums, and each corruption that loses over 5 points and passes."""
    every = [(key, trial) for key, found in trials.items() for trial in found]
    bad = [(key, trial) for key, trial in every if trial.loss > LOSS]
    missed = [(key, trial) for key, trial in bad if not trial.caught]
    print(f"{len(every)} corruptions, {len(bad)} lose over 5 points, {len(missed)} of them missed")
    if bad:
        print(f"caught: {100 * (1 - len(missed) / len(bad)):.2f} %")
    for key, trial in missed:
        print(f"  {key}, {trial.form}: {trial.kind}, loses {100 * trial.loss:.1f} points")


if __name__ == "__main__":
    main()
