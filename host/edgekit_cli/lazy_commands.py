"""Groups of commands whose modules are imported when a command is called, so that help answers at once."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import click


class LazyCommand(click.Command):
    """Stands for a command in help and completion; the command's module is imported when it is called."""

    def __init__(self, module: str, name: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Make the context of the real command, with which click continues."""
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> click.Command:
        """Import the module; return its attribute `command`, or `name` if the module is named otherwise."""
        module = importlib.import_module(self._module)
        is_own = self._module.endswith(f".{self.name}")
        command: click.Command = module.command if is_own else getattr(module, str(self.name))
        return command


def lazy_commands(
    names: Mapping[str, str], folder: str, files: Mapping[str, str] | None = None
) -> list[click.Command]:
    """Return those commands of a Python package whose modules are installed, in the order of `names`.

    Args:
        names: name of a command -> its short help.
        folder: name of the package, such as `edgekit_cli.hil`.
        files: name of a command -> name of its module; by default the command's own name.
    """
    modules = {name: f"{folder}.{(files or {}).get(name, name)}" for name in names}
    return [
        LazyCommand(modules[name], name, text)
        for name, text in names.items()
        if importlib.util.find_spec(modules[name])
    ]


class OrderedGroup(click.Group):
    """Lists its commands in the given order, not alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)
