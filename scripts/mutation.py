"""Mutation testing with cosmic-ray: a sample of small changes to the code, each of which a test should see.

Run by scripts/mutation. The code is changed in a clone of the last commit, never in this checkout. A mutant
that no test can see, because it changes nothing that matters, is listed with its reason in
`tests/equivalent_mutants.json` and does not count. Left out are the annotations of types, `strict=` of `zip`
and the options of `@dataclass`: they guard against mistakes or save memory, and no result depends on them.
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec, WorkerOutcome, WorkItem, WorkResult

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = "device_runtime/edgekit_runtime"
TOOLKIT = "toolkit/edgekit_toolkit"
# What is mutated, and the tests that must see it, the quickest first.
AREAS = {
    "slots": (
        [f"{RUNTIME}/slots"],
        ["tests/runtime/test_values.py", "tests/runtime/test_slots_state.py",
         "tests/runtime/test_slots_transitions.py", "tests/runtime/test_slots_access.py",
         "tests/runtime/test_client_control.py", "tests/runtime/test_slots_folder.py",
         "tests/runtime/test_slots.py",
         "tests/runtime/test_slots_sequences.py", "tests/runtime/test_slots_commands.py",
         "tests/runtime/test_slots_hostile.py", "tests/runtime/test_slots_faults.py"],
    ),
    "signing": (
        [f"{RUNTIME}/trust/{name}.py" for name in ("trust_store", "dsse", "keys")],
        ["tests/runtime/test_values.py", "tests/runtime/test_signing.py", "tests/runtime/test_public_keys.py",
         "tests/toolkit/test_sign.py", "tests/runtime/test_package.py", "tests/runtime/test_evidence.py"],
    ),
    "package": (
        [f"{RUNTIME}/package/{name}.py"
         for name in ("archive", "canonical_zip", "manifest", "manifest_entries", "member_names",
                      "variants")],
        ["tests/runtime/test_values.py", "tests/runtime/test_names.py", "tests/runtime/test_manifest.py",
         "tests/runtime/test_package.py", "tests/runtime/test_package_bounds.py",
         "tests/runtime/test_package_format.py", "tests/runtime/test_package_hostile.py",
         "tests/runtime/test_variants.py"],
    ),
    "choice": (
        [f"{TOOLKIT}/selection/{name}.py" for name in ("budget", "choice")],
        ["tests/toolkit/test_budget.py", "tests/toolkit/test_search.py"],
    ),
    "judge": (
        [*(f"{TOOLKIT}/evaluation/{name}.py" for name in ("judge", "scoring", "metrics", "drops")),
         f"{TOOLKIT}/selection/confirmation.py"],
        ["tests/toolkit/test_metrics.py", "tests/toolkit/test_scoring.py", "tests/toolkit/test_drops.py",
         "tests/toolkit/test_confirmation.py"],
    ),
    "costs": (
        [f"{TOOLKIT}/costs/target_model.py", f"{TOOLKIT}/costs/onnx_operators.py",
         f"{TOOLKIT}/onnx_graph/control_flow.py"],
        ["tests/toolkit/test_energy.py", "tests/toolkit/test_node_costs.py",
         "tests/toolkit/test_control_flow.py"],
    ),
}  # fmt: skip
# Annotations join types with `|`: to change that is an error when the module is imported, and no mutant.
_ANNOTATION = "core/ReplaceBinaryOperator_BitOr_"
# What stands before a value that only guards or stores.
_GUARD = re.compile(r"\bzip\(.*\bstrict=$|^\s*@dataclass\(")
_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of the code and what became of it.

    Attributes:
        area: of `AREAS`.
        position: file and line.
        before, after: the changed line.
        survived: whether all tests passed with it.
    """

    area: str
    position: str
    before: str
    after: str
    survived: bool


def main() -> int:
    """Run the sample; 0 where at least the wanted share of the mutants was killed."""
    parser = argparse.ArgumentParser(prog="scripts/mutation", description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of: {', '.join(AREAS)}; all by default")
    parser.add_argument("--sample", type=int, default=40, help="mutants an area [%(default)s]")
    parser.add_argument("--seed", type=int, default=1, help="of the sample [%(default)s]")
    parser.add_argument("--share", type=float, default=0.9, help="to be killed [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print the mutants as JSON")
    options = parser.parse_args()
    if strangers := set(options.areas) - set(AREAS):
        parser.error(f"no area {min(strangers)!r}; there are {', '.join(AREAS)}")
    equivalent = _equivalent_mutants()
    mutants = [
        mutant
        for area in options.areas or AREAS
        for mutant in _run_area(area, options.sample, options.seed)
        if (mutant.before, mutant.after) not in equivalent
    ]
    return _report(mutants, options.share, as_json=options.json)


def _equivalent_mutants() -> set[tuple[str, str]]:
    listed = json.loads((ROOT / "tests/equivalent_mutants.json").read_text())
    return {(entry["before"], entry["after"]) for entry in listed}


def _run_area(area: str, count: int, seed: int) -> list[Mutant]:
    modules, tests = AREAS[area]
    with tempfile.TemporaryDirectory(prefix="edgekit-mutation-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", "--shared", ROOT, clone], check=True)
        python = ROOT / ".venv/bin/python"
        command = [str(python), "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        config, session = Path(folder) / "config.toml", Path(folder) / "session.sqlite"
        config.write_text(
            f"[cosmic-ray]\nmodule-path = {json.dumps(modules)}\n"
            f"timeout = {_TIMEOUT_S}\nexcluded-modules = []\n"
            f"test-command = {json.dumps(' '.join(command))}\n"
            '[cosmic-ray.distributor]\nname = "local"\n'
        )
        print(f"{area}: the tests without a change", file=sys.stderr, flush=True)
        _cosmic_ray(["baseline", str(config)], clone)
        _cosmic_ray(["init", str(config), str(session)], clone)
        with use_db(session, WorkDB.Mode.open) as work:
            chosen = _keep_sample(work, clone, count, random.Random(f"{seed} {area}"))  # noqa: S311 - a sample
        print(f"{area}: {chosen} mutants", file=sys.stderr, flush=True)
        _cosmic_ray(["exec", str(config), str(session)], clone)
        with use_db(session, WorkDB.Mode.open) as work:
            return list(_mutants(area, work))


def _cosmic_ray(arguments: Sequence[str], folder: Path) -> None:
    program = ROOT / ".venv-mutation/bin/cosmic-ray"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([program, *arguments], cwd=folder, env=environment, check=True)


def _keep_sample(work: Any, clone: Path, count: int, rng: random.Random) -> int:
    """Leave `count` mutants to do, at most one at a place in the code; returns how many there are."""
    by_position: dict[tuple[str, tuple[int, int]], list[WorkItem]] = {}
    items = list(work.pending_work_items)
    for item in items:
        change = item.mutations[0]
        if not change.operator_name.startswith(_ANNOTATION) and not _is_guard(change, clone):
            by_position.setdefault((str(change.module_path), change.start_pos), []).append(item)
    sampled = rng.sample(sorted(by_position), min(count, len(by_position)))
    job_ids = {rng.choice(sorted(by_position[position], key=_key)).job_id for position in sampled}
    for item in items:
        if item.job_id not in job_ids:
            work.set_result(item.job_id, WorkResult(WorkerOutcome.SKIPPED))
    return len(job_ids)


def _is_guard(change: MutationSpec, clone: Path) -> bool:
    line, column = change.start_pos
    return _GUARD.search((clone / change.module_path).read_text().splitlines()[line - 1][:column]) is not None


def _key(item: WorkItem) -> tuple[str, int]:
    return item.mutations[0].operator_name, item.mutations[0].occurrence


def _mutants(area: str, work: Any) -> Iterator[Mutant]:
    results = {job: result for job, result in work.results if result.worker_outcome != WorkerOutcome.SKIPPED}
    for item in work.work_items:
        result = results.get(item.job_id)
        if result is None:
            continue
        change = item.mutations[0]
        lines = (result.diff or "").splitlines()
        before, after = (
            " ".join(
                line[1:].strip() for line in lines if line.startswith(sign) and not line.startswith(sign * 3)
            )
            for sign in "-+"
        )
        position = f"{change.module_path}:{change.start_pos[0]}"
        yield Mutant(area, position, before, after, not result.is_killed)


def _report(mutants: Sequence[Mutant], least_share: float, *, as_json: bool) -> int:
    if as_json:
        print(
            json.dumps(
                [{name: getattr(mutant, name) for name in Mutant.__slots__} for mutant in mutants], indent=1
            )
        )
    else:
        for mutant in mutants:
            if mutant.survived:
                print(f"survived  {mutant.position}\n  - {mutant.before}\n  + {mutant.after}")
        for area in dict.fromkeys(mutant.area for mutant in mutants):
            own = [mutant for mutant in mutants if mutant.area == area]
            print(f"{area:8} {sum(not mutant.survived for mutant in own):3} of {len(own)} killed")
    killed = sum(not mutant.survived for mutant in mutants)
    share = killed / max(len(mutants), 1)
    print(f"{killed} of {len(mutants)} killed ({share:.0%}), expected {least_share:.0%}", file=sys.stderr)
    return 0 if share >= least_share else 1


if __name__ == "__main__":
    sys.exit(main())
