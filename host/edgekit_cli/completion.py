"""`edgekit completion`: the completion script of a shell for edgekit's commands and options."""

import json

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the shell and its script.")
@click.pass_context
def command(ctx: click.Context, shell: str, *, as_json: bool) -> None:
    """Print the completion script of SHELL.

    \b
    bash:  eval "$(edgekit completion bash)"    in ~/.bashrc
    zsh:   eval "$(edgekit completion zsh)"     in ~/.zshrc
    fish:  edgekit completion fish | source     in ~/.config/fish/config.fish
    """  # noqa: D301 - click reads the control character \\b as "keep these lines"
    completion = get_completion_class(shell)
    if completion is None:
        raise click.UsageError(f"this click release cannot complete for {shell}; update click")
    script = completion(ctx.find_root().command, {}, "edgekit", "_EDGEKIT_COMPLETE").source()
    click.echo(json.dumps({"shell": shell, "script": script}) if as_json else script)
