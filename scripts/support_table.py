"""Write the table of devices in README.md from the evidence in hil/evidence; a test compares the two.

Usage: python scripts/support_table.py [--check]

A cell says what a run has shown, and no more: kind of bench, device, tests that passed, date, commit. The
device is what it says of itself, so that a bench with the wrong target is seen.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from edgekit_host.evidence import Evidence, read_folders
from edgekit_runtime.system.engines import list_registered
from edgekit_toolkit.targets.loader import list_targets
from edgekit_toolkit.targets.spec import Target

ROOT: Final = Path(__file__).resolve().parent.parent
README: Final = ROOT / "README.md"
EVIDENCE: Final = ROOT / "hil" / "evidence"
BEGIN: Final = "<!-- written by scripts/support_table.py -->\n"
END: Final = "<!-- end -->\n"
_GOLDEN: Final = "test_package_installs_and_matches_golden_outputs["  # its last parameter is the engine
_KINDS: Final = ("real", "emulated", "simulated")
_ENGINES: Final = {engine.name: engine.title for engine in list_registered() if engine.file_format}


def make_table(targets: Sequence[Target], seen: Sequence[Evidence]) -> str:
    """Return the table in Markdown, one row for each target.

    Args:
        targets: all that there are.
        seen: evidence, oldest first.
    """
    lines = [
        "| target | engines | on the real device | on an emulated or simulated one |",
        "|---|---|---|---|",
    ]
    for target in targets:
        names = ", ".join(f"`{name}`" for name in (target.name, *target.aliases))
        engines = [each for each in (target.backend.default, target.backend.fallback) if each]
        own = [each for each in seen if each.target == target.name]
        real = _describe_newest([each for each in own if each.kind == "real"])
        stand_in = _describe_newest([each for each in own if each.kind != "real"])
        shown = ", then ".join(_ENGINES.get(each, each) for each in engines)
        lines.append(f"| {names} | {shown} | {real or '**no run yet**'} | {stand_in or 'no run yet'} |")
    return "\n".join(lines) + "\n"


def _describe_newest(evidence: Sequence[Evidence]) -> str:
    """Return the newest run of each bench; empty without any."""
    newest = {each.bench: each for each in evidence}
    return "; ".join(
        _describe(each) for each in sorted(newest.values(), key=lambda one: _KINDS.index(one.kind))
    )


def _describe(evidence: Evidence) -> str:
    kind = "" if evidence.kind == "real" else f"{evidence.kind}, "
    failed, skipped = evidence.count("failed"), evidence.count("skipped")
    parts = [
        " ".join(evidence.device.model.replace("|", "/").split()),
        f"{evidence.count('passed')} tests passed",
    ]
    parts += [f"**{failed} failed**"] * bool(failed) + [f"{skipped} skipped"] * bool(skipped)
    parts += [f"{evidence.left_out} left out"] * bool(evidence.left_out)
    if computed := _list_engines(evidence):
        parts.append(f"golden outputs on {', '.join(computed)}")
    if evidence.kind == "real" and evidence.network_times is not None:
        parts.append("costs of latency measured")
    dirty = " with uncommitted changes" if evidence.is_dirty else ""
    source = f"commit {evidence.commit[:9]}{dirty}" if evidence.commit else "a release"
    link = f"[{evidence.bench}](hil/evidence/{evidence.file_name})"
    return f"{link}: {kind}{', '.join(parts)}; {evidence.date[:10]}, {source}"


def _list_engines(evidence: Evidence) -> list[str]:
    """Return the engines on which every package computed its golden outputs."""
    outcomes: dict[str, set[str]] = {}
    for each in evidence.tests:
        if _GOLDEN in each.test:
            outcomes.setdefault(each.test.rstrip("]").rpartition("-")[2], set()).add(each.outcome)
    return [title for engine, title in _ENGINES.items() if outcomes.get(engine) == {"passed"}]


def split_readme(text: str) -> tuple[str, str, str]:
    """Return what is before, between and after the marks."""
    before, found, rest = text.partition(BEGIN)
    table, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"README.md: expected a table between {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN, table, END + after


def main() -> int:
    """Write the table, or with --check say whether it is right."""
    before, table, after = split_readme(README.read_text(encoding="utf-8"))
    wanted = make_table(list_targets([]), read_folders([EVIDENCE]))
    if "--check" in sys.argv[1:]:
        if table != wanted:
            print("README.md differs from hil/evidence: run scripts/support_table.py", file=sys.stderr)
        return int(table != wanted)
    README.write_text(before + wanted + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
