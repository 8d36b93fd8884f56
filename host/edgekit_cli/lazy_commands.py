"""Groups of commands whose modules are imported only when called, so that help answers at once."""

import importlib
import importlib.util
from collections.abc import Mapping
from typing import Any

import click


class LazyCommand(click.Command):
    """Represents a command in help and completion, and imports its module when the command is called."""

    def __init__(self, module: str, name: str, short_help: str) -> None:
        super().__init__(name, short_help=short_help)
        self._module = module

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Create the context of the real command, so that click runs that command."""
        return self.load().make_context(info_name, args, parent, **extra)

    def load(self) -> click.Command:
        """Import the module, and return the command.

        In a module with the same name as the command, the function is called `command`. In any other module,
        the function has the name of the command.
        """
        module = importlib.import_module(self._module)
        is_own = self._module.endswith(f".{self.name}")
        command: click.Command = module.command if is_own else getattr(module, str(self.name))
        return command


def lazy_commands(
    names: Mapping[str, str], folder: str, files: Mapping[str, str] | None = None
) -> list[click.Command]:
    """Return the commands of a Python package whose modules are installed, in the order of `names`.

    Args:
        names: The short help of each command by name.
        folder: The name of the Python package, such as `edgekit_cli.hil`.
        files: A dict from command to module name, for modules that are not named like the command.
    """
    modules = {name: f"{folder}.{(files or {}).get(name, name)}" for name in names}
    return [
        LazyCommand(modules[name], name, text)
        for name, text in names.items()
        if importlib.util.find_spec(modules[name])
    ]


class OrderedGroup(click.Group):
    """A group that lists its commands in the given order instead of alphabetically."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(self.commands)
