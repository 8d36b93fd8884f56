"""`edgekit package pipeline.toml`: packages several models and their connections as one version."""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeAlias

import click
from rich.console import Console

from edgekit_host.terminal import print_line, print_section
from edgekit_runtime.errors import BudgetError
from edgekit_runtime.package.archive import OpenedPackage, read_package, write_package
from edgekit_runtime.pipelines.member import naming_stage
from edgekit_runtime.system.paths import find_keys_folder
from edgekit_runtime.trust.trust_store import TrustStore
from edgekit_toolkit.packaging.assemble import PackageDraft, package_file
from edgekit_toolkit.packaging.evidence import evidence_path, read_evidence, write_evidence
from edgekit_toolkit.packaging.next_version import find_free_version
from edgekit_toolkit.packaging.pipeline_file import read_pipeline_file
from edgekit_toolkit.packaging.pipeline_package import StageCosts, add_costs, assemble_pipeline, count_costs
from edgekit_toolkit.packaging.signing_keys import StatementSigner, load_signer
from edgekit_toolkit.pipeline.drafts import size_figures
from edgekit_toolkit.pipeline.publish import evidence_of, output_folder, staging
from edgekit_toolkit.report.pipeline_page import HEAD, NOTE, list_rows, list_totals, render_pipeline_page
from edgekit_toolkit.selection.budget import Budget, parse_budget
from edgekit_toolkit.targets.loader import find_user_targets, load_target

PackageModel: TypeAlias = Callable[[Path, list[str]], Path]
"""Packages a model file with these arguments of `edgekit package`, and returns the path of the package."""

_OWN_OPTIONS: Final = frozenset(
    {"target", "budget", "out", "name", "version", "key", "device_keys", "as_json"}
)
_PER_MEMBER: Final = ("drop", "energy")  # limits that are kept by each member, when it is packaged


def package_pipeline(
    ctx: click.Context, path: Path, console: Console, *, package_model: PackageModel
) -> Path:
    """Write the package of a pipeline to the folder of `--out`, print its contents, and return its path.

    `package_model` is a function that packages a member which is given as a model file.

    Raises:
        click.UsageError: A required option is missing, or an option only applies to models.
        DataError: The file or a member cannot be used.
        BudgetError: The pipeline exceeds a limit, or a value that has a limit is unknown.
    """
    options = ctx.params
    _check_options(ctx)
    target = load_target(options["target"], [find_user_targets()]).name
    limits = _read_limits(options["budget"])
    file = read_pipeline_file(path)
    name, out = options["name"] or file.name, options["out"]
    with output_folder(out), ExitStack() as opened:
        signer = load_signer(options["key"])
        packages: dict[str, OpenedPackage] = {}
        evidence: dict[str, Mapping[str, Any]] = {}
        trust = TrustStore.from_folder(find_keys_folder())
        for stage, source in file.sources.items():
            member = source.path
            if source.options is not None:
                arguments = ["--target", target, *_list_arguments(source.options, path.parent)]
                with naming_stage(stage):
                    member = package_model(member, arguments)
            packages[stage] = opened.enter_context(read_package(member, trust))
            if evidence_path(member).exists():
                evidence[stage] = read_evidence(evidence_path(member), member, trust).predicate
        costs = count_costs(file.stages, packages, evidence)
        version = options["version"] or find_free_version(name, target, out)
        identity = (name, version, target)
        draft = assemble_pipeline(
            identity, file.stages, file.output, packages, budget=limits.limits, costs=costs
        )
        document = _describe(draft, signer, limits, costs)
        _check_limits(limits, document["figures"], costs)
        _write(draft, signer, out, document, costs)
    if options["as_json"]:
        click.echo(json.dumps(document))
    else:
        _show(console, document, costs, out)
    return Path(out / draft.manifest.file_name)


def _describe(
    draft: PackageDraft, signer: StatementSigner, limits: Budget, costs: list[StageCosts]
) -> dict[str, Any]:
    """Return the output of `--json`."""
    content, manifest = package_file(draft, signer), draft.manifest
    return {
        "name": manifest.name,
        "version": manifest.version,
        "target": manifest.target,
        "package": manifest.file_name,
        "budget": dict(limits.limits),
        "figures": {**add_costs(costs, len(content)), **size_figures(content, limits)},
        "stages": [asdict(stage) for stage in costs],
    }


def _write(
    draft: PackageDraft,
    signer: StatementSigner,
    out: Path,
    document: Mapping[str, Any],
    costs: list[StageCosts],
) -> None:
    with staging(out) as folder:
        written = folder / draft.manifest.file_name
        write_package(written, draft.manifest, draft.artifacts, signer)
        write_evidence(evidence_path(written), written, evidence_of(document), signer)
        report = folder / f"{written.name.removesuffix('.edgepkg')}.report.html"
        report.write_text(render_pipeline_page(document, costs), encoding="utf-8")
        report.with_suffix(".json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _check_options(ctx: click.Context) -> None:
    if ctx.params["target"] is None:
        raise click.UsageError("Missing option '--target'; `edgekit targets` lists them.")
    stated = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in _OWN_OPTIONS
        and ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if stated:
        raise click.UsageError(
            f"{stated[0]} is for one model: write it into `options` of a stage with a model."
        )


def _read_limits(text: str) -> Budget:
    stated = parse_budget(text).limits
    if wrong := [name for name in _PER_MEMBER if f"{name}=" in text.replace(" ", "")]:
        raise click.UsageError(
            f"the limit on {wrong[0]} is kept by each member: give it when you package that"
        )
    return Budget({name: limit for name, limit in stated.items() if name not in _PER_MEMBER})


def _list_arguments(options: Mapping[str, Any], folder: Path) -> list[str]:
    """Return options as command line arguments. Paths are resolved in the folder of the pipeline file."""
    arguments = []
    for name, value in options.items():
        for item in value if isinstance(value, list) else [value]:
            is_file = isinstance(item, str) and (folder / item).exists()
            text = [] if item is True else [str(folder / item) if is_file else str(item)]
            arguments += [f"--{name.replace('_', '-')}", *text]
    return arguments


def _check_limits(limits: Budget, figures: Mapping[str, float | None], costs: list[StageCosts]) -> None:
    if unknown := [name for name in limits.limits if figures[name] is None]:
        lacking = [
            stage.name
            for stage in costs
            if (stage.latency_ms if unknown[0] == "latency" else stage.engine_bytes) is None
        ]
        raise BudgetError(
            f"the {unknown[0]} of the pipeline is not known, since no evidence beside the package of stage"
            f" '{lacking[0]}' states it; copy its .evidence.json beside it, or leave out the limit",
            binding=tuple(unknown),
        )
    stated = {name: value for name, value in figures.items() if value is not None}
    if over := limits.violations(stated):
        rows = {row[0]: row for row in list_totals(figures, limits.limits)}
        texts = [" ".join(rows[title]) for title in rows if rows[title][2] != "no limit"]
        raise BudgetError(
            f"the pipeline exceeds its limit on {', '.join(over)}: {'; '.join(texts)}. To package: fewer"
            " max_crops, smaller members, or a wider limit",
            binding=over,
        )


def _show(console: Console, document: Mapping[str, Any], costs: list[StageCosts], out: Path) -> None:
    title = f"{document['name']} {document['version']} for {document['target']}"
    print_line(console, "pipeline", (title, "bold"))
    print_section(console, "Stages", [HEAD, *list_rows(costs)])
    print_line(console, NOTE, first_indent=2, indent=2)
    print_section(console, "Whole pipeline", list_totals(document["figures"], document["budget"]))
    print_section(console, "Written", [("Package", out / document["package"])])
