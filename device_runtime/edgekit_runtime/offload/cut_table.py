"""The cut table of a package: the few plans that may be optimal under some conditions, with their costs.

A plan is one way to run the model: completely on the device, completely on a server, or split. The table is
an artifact of the package, so the package's signature covers it. This module neither chooses plans nor
measures.

Source: docs/reference/package-format.md, section "Cut table".
"""

import json
from typing import Annotated, Final

from edgekit_runtime.dataclass_json import Range, from_plain
from edgekit_runtime.errors import CutError
from edgekit_runtime.offload.objectives import OBJECTIVES
from edgekit_runtime.offload.offload_plan import OffloadPlan, Seconds
from edgekit_runtime.package.archive import OpenedPackage
from edgekit_runtime.records import dataclass

CUT_TABLE_ROLE: Final = "cut-table"
CODED_PLANS_ROLE: Final = "coded-plans"
"""The role of a table of plans with decoders, which earlier runtimes refuse in a cut table."""
TABLE_ROLES: Final = (CUT_TABLE_ROLE, CODED_PLANS_ROLE)
MAX_PLANS: Final = 64


@dataclass(frozen=True, slots=True)
class CutTable:
    """The plans of a package.

    Attributes:
        plans: at least one plan. All names are different.
        objective: the objective for which the plans were selected.
        device, server: machines on which the costs were measured, such as `Cortex-A76, 4 cores`.
        latency_limit_s: limit of the latency of a request. For the objective capacity, it applies to the 99th
            percentile.
        radio_w: power of the device's radio above idle, in watts, from the request to the reply. If set,
            every plan must have `device_j`.

    Raises:
        ValueError: there are no plans, too many plans, or two plans with the same name, or a field that the
            objective or `radio_w` requires is missing.
    """

    plans: tuple[OffloadPlan, ...]
    objective: str = "latency"
    device: str = ""
    server: str = ""
    latency_limit_s: Seconds | None = None
    radio_w: Annotated[float, Range(0, 10**6)] | None = None
    version: Annotated[int, Range(1, 1)] = 1

    def __post_init__(self) -> None:
        names = [plan.name for plan in self.plans]
        if not 1 <= len(names) <= MAX_PLANS:
            raise ValueError(f"holds {len(names)} plans, expected 1 to {MAX_PLANS}")
        if len(set(names)) != len(names):
            raise ValueError(f"two plans have the same name: {', '.join(names)}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective is {self.objective!r}, expected one of {', '.join(OBJECTIVES)}")
        for field in OBJECTIVES[self.objective].needs:
            if getattr(self, field) is None:
                raise ValueError(f"the objective {self.objective} needs {field}")
        if self.radio_w is not None and any(plan.costs.device_j is None for plan in self.plans):
            raise ValueError("with radio_w, every plan needs device_j")

    @property
    def local(self) -> OffloadPlan | None:
        """The plan that sends nothing, or None if the model is too large for the device."""
        return next((plan for plan in self.plans if plan.tail is None), None)


def read_cut_table(package: OpenedPackage) -> CutTable | None:
    """Return the cut table of a verified package with all its plans, or None if it has no table.

    Raises:
        CutError: the table is malformed, or names a submodel that is not in the package.
    """
    artifacts = package.manifest.artifacts
    paths = [artifact.path for role in TABLE_ROLES for artifact in artifacts if artifact.role == role]
    if not paths:
        return None
    where = f"{package.path}: {', '.join(paths)}"
    try:
        plain, *further = (json.loads(bytes(package.read(path))) for path in paths)
        for plans in further:
            plain["plans"] += plans
    except (ValueError, RecursionError, KeyError, TypeError) as cause:
        raise CutError(f"{where}: no JSON: {cause}; package the model again") from cause
    table = from_plain(CutTable, plain, where, CutError)
    submodel_names = {submodel.name for submodel in package.manifest.submodels}
    for plan in table.plans:
        for part in (plan.head, plan.decoder):
            if part is not None and part not in submodel_names:
                raise CutError(
                    f"{where}: plan '{plan.name}' needs the submodel '{part}', the package has none"
                )
    return table
