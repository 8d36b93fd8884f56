"""The configuration of one model as a table of the TOML file states it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from edgekit_runtime.errors import ConfigError, ManifestError
from edgekit_runtime.service.options.model import GovernorOptions, Isolation, ModelOptions, SchedulingLimits
from edgekit_runtime.service.options.rollout import Gates, Rollout, RolloutKind, ShadowOptions
from edgekit_runtime.service.options.toml_tables import Range, read_section, take_table
from edgekit_runtime.service.options.version_policy import VersionPolicy
from edgekit_runtime.system.machine import MAX_THREADS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Single:
    """What a model's table states in single values."""

    latest: Annotated[int, Range(1, 1000)] = 1
    specific: tuple[str, ...] = ()
    swap: Literal["auto", "availability", "resource"] = "auto"
    rollout: RolloutKind = "swap"
    threads: Annotated[int | None, Range(1, MAX_THREADS)] = None
    load_timeout_s: float | None = None
    instances: Annotated[int, Range(1, MAX_THREADS)] = 1
    isolated: bool | None = None
    cache: bool = False
    drift: bool = True
    keep_loaded: bool = False

    def __post_init__(self) -> None:
        if self.rollout != "swap" and (self.latest != 1 or self.specific):
            raise ValueError(
                f"rollout = {self.rollout!r} compares the newest version with the one before, which leaves no"
                " room for latest and specific"
            )
        if self.load_timeout_s == 0:
            raise ValueError("load_timeout_s is 0, expected more: no version is loaded in no time")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Canary:
    """The table of a canary."""

    share: Annotated[float, Range(0, 1)] = 0.1
    compared_share: Annotated[float, Range(0, 1)] = 0.25
    retry: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class _Comparison:
    """What the tables of a canary and of a shadow state beside the rest."""

    comparison: Literal["agreement", "similarity"] | None = None


def read_model(name: str, table: object) -> ModelOptions:
    """Return the options that the table `models.NAME` states.

    Raises:
        ConfigError: a setting is unknown, of a wrong type, out of range, or does not go with another one.
    """
    where = f"models.{name}"
    if not isinstance(table, dict):
        raise ConfigError(f"{where}: expected a table, got {type(table).__name__}")
    settings = dict(table)
    tables = {
        part: take_table(settings, part, where)
        for part in ("scheduling", "isolation", "canary", "shadow", "gates", "governor")
    }
    single = read_section(_Single, settings, where)
    scheduling = read_section(SchedulingLimits, tables["scheduling"], f"{where}.scheduling")
    governor = None
    if "governor" in table:
        governor = read_section(GovernorOptions, tables["governor"], f"{where}.governor")
    isolation = read_section(Isolation, tables["isolation"], f"{where}.isolation")
    rollout = _read_rollout(single.rollout, tables, where)
    needs_one = rollout.kind != "swap" or governor is not None
    if single.isolated and isolation.processes > 1 and needs_one:
        raise ConfigError(
            f"{where}: a canary, a shadow or a governor needs all of a model in one process, got"
            f" isolation.processes = {isolation.processes}; set that to 1, or leave the others out"
        )
    return ModelOptions(
        VersionPolicy(single.latest, single.specific),
        None if single.swap == "auto" else single.swap,
        single.threads,
        single.load_timeout_s,
        single.instances,
        scheduling,
        isolation if single.isolated else None,
        rollout=rollout,
        in_process=single.isolated is False,
        cache=single.cache,
        drift=single.drift,
        keep_loaded=single.keep_loaded,
        governor=governor,
    )


def _read_rollout(kind: RolloutKind, tables: Mapping[str, dict[str, Any]], where: str) -> Rollout:
    comparisons = {kind: _take_comparison(tables[kind], f"{where}.{kind}") for kind in ("canary", "shadow")}
    canary = read_section(_Canary, tables["canary"], f"{where}.canary")
    # TOML has no null: 0 switches a gate off that can be.
    optional = {known.name for known in fields(Gates) if "None" in str(known.type)}
    stated = tables["gates"]
    off: dict[str, Any] = {name: None for name in optional if stated.get(name) == 0}
    kept = {name: value for name, value in stated.items() if name not in off}
    gates = replace(read_section(Gates, kept, f"{where}.gates"), **off)
    try:
        return Rollout(
            kind=kind,
            share=canary.share,
            compared_share=canary.compared_share,
            retry=canary.retry,
            gates=gates,
            shadow=read_section(ShadowOptions, tables["shadow"], f"{where}.shadow"),
            comparison=comparisons.get(kind),
        )
    except ManifestError as cause:
        raise ConfigError(f"{where}: {cause}") from cause


def _take_comparison(table: dict[str, Any], where: str) -> str | None:
    stated = {"comparison": table.pop("comparison")} if "comparison" in table else {}
    return read_section(_Comparison, stated, where).comparison
