"""Targets: what each device class has, which engines run there, and what inference costs.

The data are TOML files in this folder, one a target. docs/reference/targets.md says how the figures were
obtained and how to add a target.
"""

from edgekit_toolkit.targets.figures import Figure, Source, Status
from edgekit_toolkit.targets.loader import list_targets, load_target, read_target, user_target_dir
from edgekit_toolkit.targets.spec import (
    Backend,
    Costs,
    Cpu,
    Memory,
    Power,
    PowerMode,
    Precision,
    Quantization,
    Release,
    Storage,
    Target,
)

__all__ = [
    "Backend",
    "Costs",
    "Cpu",
    "Figure",
    "Memory",
    "Power",
    "PowerMode",
    "Precision",
    "Quantization",
    "Release",
    "Source",
    "Status",
    "Storage",
    "Target",
    "list_targets",
    "load_target",
    "read_target",
    "user_target_dir",
]
