"""`edgekit package MODEL --recipe FILE`: repeats an earlier packaging without a search."""

import json
from collections.abc import Mapping
from pathlib import Path

import click
from rich.console import Console

from edgekit_cli.progress import ProgressBar
from edgekit_host.terminal import print_line, print_section
from edgekit_toolkit.packaging.recipe import Recipe, read_recipe
from edgekit_toolkit.packaging.signing_keys import load_signer
from edgekit_toolkit.pipeline.publish import PublishedFiles, evidence_of, output_folder, publish, staging
from edgekit_toolkit.pipeline.replay import read_earlier, repeat
from edgekit_toolkit.targets.loader import find_user_targets, load_target


def check_alone(ctx: click.Context) -> None:
    """Refuse options that the recipe already decides, because they would be ignored.

    Raises:
        click.UsageError: Such an option was given.
    """
    stated = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in {"recipe", "like", "target", "out", "key", "device_keys", "as_json"}
        and ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if stated:
        raise click.UsageError(
            f"--recipe holds what {', '.join(stated)} would decide; give it alone (with -o, --key, --json,"
            " the recipe's own --target, and --like for an update)."
        )


def _check_target(target: str | None, recipe: Recipe) -> None:
    """Refuse a target that differs from the recipe's. The target's own file may be missing."""
    if target in {None, recipe.target}:
        return
    name = load_target(str(target), [find_user_targets()]).name
    if name != recipe.target:
        raise click.UsageError(
            f"the recipe is for target {recipe.target}, --target {target} is {name}; leave out --target, or"
            f" leave out --recipe to package for {name}."
        )


def repeat_recipe(
    model: Path,
    path: Path,
    out: Path,
    console: Console,
    *,
    like: Path | None,
    target: str | None,
    key: str,
    as_json: bool,
) -> Path:
    """Create the package of a recipe again, and return its path.

    The same model, tools and key give the same bytes. If `like` is the recipe of an earlier package, the new
    weights stay close to the weights of that package. `target` is the value of `--target`, which must match
    the recipe.

    Raises:
        click.UsageError: The recipe is for another target.
        RecipeError: The recipe cannot be repeated.
        OutputError: The results cannot be written.
    """
    recipe = read_recipe(path)
    _check_target(target, recipe)
    with output_folder(out):
        signer = load_signer(key)
        with ProgressBar(console) as progress:
            progress.show("repeating the recipe")
            assembled = repeat(model, recipe, None if like is None else read_earlier(like)[1])
            evidence = evidence_of({"repeated": recipe.sha256, "target": recipe.target})
            with staging(out) as stage:
                published = publish(assembled, recipe, evidence, stage, signer)
    if as_json:
        result = {
            "package": str(out / published.package),
            "bytes": published.size_bytes,
            "sha256": published.sha256,
            "key_id": published.key_id,
            "recipe_sha256": recipe.sha256,
        }
        click.echo(json.dumps(result))
    else:
        _print_summary(console, recipe, published, out)
    return out / published.package


def _print_summary(console: Console, recipe: Recipe, published: PublishedFiles, out: Path) -> None:
    title = f"{recipe.name} {recipe.version} for {recipe.target}"
    print_line(console, "repeated", (title, "bold"), f"({recipe.backend}, {recipe.form.kind})")
    score = recipe.figures.get("score")
    if isinstance(score, Mapping):
        stated = f"{score.get('metric')} {score.get('value')}, source {score.get('source_value')}"
        print_line(console, f"its recipe states: {stated} ({score.get('samples')} samples)", indent=2)
    print_line(console, "no report: nothing was searched or judged again, that of the first run still holds")
    print_section(
        console,
        "Written",
        [
            ("Package", out / published.package),
            ("Size", f"{published.size_bytes:,} bytes"),
            ("SHA-256", published.sha256),
            ("Key", published.key_id),
            ("Recipe", out / published.recipe),
            ("Evidence", out / published.evidence),
        ],
    )
