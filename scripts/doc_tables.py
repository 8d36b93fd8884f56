"""Write the tables of the docs that derive from records: a test compares them.

Usage: python scripts/doc_tables.py [--check]

The table of devices in README.md is from the evidence in hil/evidence. A cell says what a run has shown, and
no more: kind of bench, device, tests that passed, date. The device is what it says of itself, so that a bench
with the wrong target is seen. The table of limits is from the gates of a rollout, the tables of tasks and
streams from their records and the docstrings of their options.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from edgekit_fleet.rollouts.gate_table import LIMITS
from edgekit_fleet.rollouts.outside_gates import OutsideGate
from edgekit_host.evidence import Evidence, read_folders
from edgekit_runtime.dataclass_json import list_settings
from edgekit_runtime.protocol.device_settings import SETTINGS
from edgekit_runtime.protocol.streams import StreamOptions
from edgekit_runtime.system.engines import list_registered
from edgekit_runtime.tasks.kinds.detection import LAYOUTS
from edgekit_runtime.tasks.task import load_tasks
from edgekit_toolkit.targets.loader import list_targets
from edgekit_toolkit.targets.spec import Target

ROOT: Final = Path(__file__).resolve().parent.parent
EVIDENCE: Final = ROOT / "hil" / "evidence"
BEGIN: Final = "<!-- written by scripts/doc_tables.py -->\n"
END: Final = "<!-- end -->\n"
_KINDS: Final = ("real", "emulated", "simulated")
_ENGINES: Final = {engine.name: engine.title for engine in list_registered() if engine.file_format}


def list_devices(targets: Sequence[Target], evidence: Sequence[Evidence]) -> str:
    """Return the table in Markdown, one row for each target.

    Args:
        targets: all that there are.
        evidence: oldest first.
    """
    lines = ["| target | engines | on the real device | on a stand-in |", "|---|---|---|---|"]
    for target in targets:
        names = ", ".join(f"`{name}`" for name in (target.name, *target.aliases))
        engines = target.backend.names
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


def list_limits() -> str:
    """Return the table of the limits of a rollout in Markdown."""
    lines = ["| limit | meaning | default | range |", "|---|---|---|---|"]
    for limit in LIMITS:
        bounds = f"{limit.range.least:g} to {limit.range.most:g}"
        lines.append(f"| `{limit.name}` | {limit.label} | {limit.shown_default} | {bounds} |")
    lines += ["", "A gate of an outside judge, declared by `--evidence`:", "", *_list_options(OutsideGate)]
    return "\n".join(lines) + "\n"


def list_tasks() -> str:
    """Return a section for each task in Markdown: its options, and the layouts of a detector."""
    sections = []
    for task in sorted(load_tasks().values(), key=lambda task: task.name):
        sections += [f"## {task.name}", "", task.sentence, ""]
        if task.name == "detection":
            sections += ["| layout | the outputs | its own options |", "|---|---|---|"]
            for name, layout in LAYOUTS.items():
                own = ", ".join(f"`{option}`" for option in layout.options)
                sections.append(f"| `{name}` | {layout.sentence} | {own} |")
            sections.append("")
        sections += [*_list_options(task.options), ""] if fields(task.options) else []
    return "\n".join(sections).rstrip("\n") + "\n"


def _list_options(options: type[Any]) -> list[str]:
    lines = ["| option | meaning | values | default |", "|---|---|---|---|"]
    for setting in list_settings(options):
        default = setting.default
        default = json.dumps(default) if isinstance(default, (bool, tuple)) else default
        default_cell = "" if setting.is_needed or default in ("", None) else f"`{default}`"
        lines.append(f"| `{setting.name}` | {setting.meaning} | {setting.values} | {default_cell} |")
    return lines


def list_device_settings() -> str:
    """Return the table of the settings of a device in Markdown."""
    lines = ["| setting | what it changes | values | heeded by |", "|---|---|---|---|"]
    for setting in SETTINGS.values():
        reader = "service and agent" if setting.reader == "both" else setting.reader
        lines.append(f"| `{setting.key}` | {setting.title} | {setting.accepted} | {reader} |")
    return "\n".join(lines) + "\n"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "README.md": lambda: list_devices(list_targets([]), read_folders([EVIDENCE])),
    "docs/explanation/rollouts.md": list_limits,
    "docs/guide/fleet.md": list_device_settings,
    "docs/reference/service.md": lambda: "\n".join(_list_options(StreamOptions)) + "\n",
    "docs/reference/tasks.md": list_tasks,
}


def replace_table(name: str, text: str, table: str) -> str:
    """Return the text of a file with this table between its marks."""
    before, marker, behind = text.partition(BEGIN)
    _, ended, after = behind.partition(END)
    if not marker or not ended:
        raise SystemExit(f"{name}: expected a table between {BEGIN.strip()} and {END.strip()}")
    return before + BEGIN + table + END + after


def main() -> int:
    """Write the tables, or with --check say which are wrong."""
    outdated = 0
    for name, make_table in TABLES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        current = replace_table(name, text, make_table())
        if current == text:
            continue
        if "--check" in sys.argv[1:]:
            print(f"{name} is outdated: run scripts/doc_tables.py", file=sys.stderr)
            outdated += 1
        else:
            path.write_text(current, encoding="utf-8")
    return outdated


if __name__ == "__main__":
    sys.exit(main())
