"""`edgekit package MODEL --recipe FILE`: an earlier package once more, without a search."""

import json
from pathlib import Path

import click
from rich.console import Console

from edgekit_toolkit.progress import ProgressBar
from edgekit_toolkit.publish import evidence_of, output_folder, publish, repeat, staging
from edgekit_toolkit.recipe import read_recipe
from edgekit_toolkit.sign import load_signer
from edgekit_toolkit.terminal import print_line


def check_alone(ctx: click.Context) -> None:
    """Refuse options whose value the recipe holds: they would be ignored."""
    given = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if isinstance(parameter, click.Option)
        and parameter.name not in {"recipe", "out", "key", "as_json"}
        and ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if given:
        raise click.UsageError(
            f"--recipe holds what {', '.join(given)} would decide; give it alone (with -o, --key and --json)."
        )


def repeat_recipe(model: Path, path: Path, out: Path, key: str, console: Console, *, as_json: bool) -> None:
    """Repeat a recipe: same model, same tools and same key give the same bytes."""
    recipe = read_recipe(path)
    with output_folder(out):
        signer = load_signer(key)
        with ProgressBar(console) as progress:
            progress.show("repeating the recipe")
            assembled = repeat(model, recipe)
            evidence = evidence_of({"repeated": recipe.sha256, "target": recipe.target})
            with staging(out) as stage:
                published = publish(assembled, recipe, evidence, stage, signer)
    package = out / published.package
    result = {
        "package": str(package), "bytes": published.size_bytes, "sha256": published.sha256,
        "key_id": published.key_id, "recipe_sha256": recipe.sha256,
    }  # fmt: skip
    if as_json:
        click.echo(json.dumps(result))
    else:
        figures = f"({published.size_bytes} bytes, sha256 {published.sha256})"
        print_line(console, f"repeated {path.name}:", package, figures)
