"""Write the table of devices in README.md from the evidence in hil/evidence; a test compares the two.

Usage: python scripts/support_table.py [--check]

A cell says what a run has shown, and no more: kind of bench, device, tests that passed, date. The device is
what it says of itself, so that a bench with the wrong target is seen.
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
_KINDS: Final = ("real", "emulated", "simulated")
_ENGINES: Final = {engine.name: engine.title for engine in list_registered() if engine.file_format}


def make_table(targets: Sequence[Target], evidence: Sequence[Evidence]) -> str:
    """Return the table in Markdown, one row for each target.

    Args:
        targets: all that there are.
        evidence: oldest first.
    """
    lines = ["| target | engines | on the real device | on a stand-in |", "|---|---|---|---|"]
    for target in targets:
        names = ", ".join(f"`{name}`" for name in (target.name, *target.aliases))
        engines = [engine for engine in (target.backend.default, target.backend.fallback) if engine]
        titles = ", then ".join(_ENGINES.get(engine, engine) for engine in engines)
        runs = [run for run in evidence if run.target == target.name]
        real = _describe_newest([run for run in runs if run.kind == "real"])
        stand_in = _describe_newest([run for run in runs if run.kind != "real"])
        lines.append(f"| {names} | {titles} | {real or '**no run yet**'} | {stand_in or 'no run yet'} |")
    return "\n".join(lines) + "\n"


def _describe_newest(evidence: Sequence[Evidence]) -> str:
    """Return the newest run of each bench; empty without any."""
    newest = {run.bench: run for run in evidence}
    return "; ".join(
        _describe(run) for run in sorted(newest.values(), key=lambda run: _KINDS.index(run.kind))
    )


def _describe(evidence: Evidence) -> str:
    """Return a run in a few words; the linked file holds engines, commit and figures."""
    failed, skipped = evidence.count("failed"), evidence.count("skipped")
    parts = [
        *([] if evidence.kind == "real" else [evidence.kind]),
        " ".join(evidence.device.model.replace("|", "/").split()),
        f"{evidence.count('passed')} passed",
        *([f"**{failed} failed**"] if failed else []),
        *([f"{skipped} skipped"] if skipped else []),
        *([f"{evidence.left_out} left out"] if evidence.left_out else []),
        *(["costs measured"] if evidence.kind == "real" and evidence.network_times is not None else []),
        evidence.date[:10],
        *(["uncommitted changes"] if evidence.is_dirty else []),
    ]
    return f"[{evidence.bench}](hil/evidence/{evidence.file_name}): {', '.join(parts)}"


def split_readme(text: str) -> tuple[str, str, str]:
    """Return what is before, between and after the marks."""
    before, marker, rest = text.partition(BEGIN)
    table, ended, after = rest.partition(END)
    if not marker or not ended:
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
