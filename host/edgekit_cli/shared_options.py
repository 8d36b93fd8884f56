"""Options that commands of several groups share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

as_json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def keys_folder_option(
    text: str = "Folder of the trusted keys, *.pub.pem.  [default: `edgekit keys list`]",
) -> Callable[[Any], Any]:
    """Return a decorator that adds the option `--keys` as the argument `keys_folder`."""
    folder = click.Path(exists=True, file_okay=False, path_type=Path)
    return click.option("--keys", "keys_folder", type=folder, help=text)
