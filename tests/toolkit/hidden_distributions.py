"""Runs commands where some distributions are not installed: neither their modules nor metadata are found.

`python -m tests.toolkit.hidden_distributions NAME,NAME COMMANDS` prints how each command ends.
"""

import contextlib
import io
import json
import sys
from importlib import metadata

from edgekit_cli.cli import main

_HIDDEN = sys.argv[1].split(",")
_MODULES = {name.replace("-", "_") for name in _HIDDEN}
_find = metadata.distribution


def _distribution(name: str) -> metadata.Distribution:
    if name in _HIDDEN:
        raise metadata.PackageNotFoundError(name)
    return _find(name)


imported = _MODULES & {name.partition(".")[0] for name in sys.modules}
assert not imported, f"imported before they were hidden: {imported}"
sys.modules.update(dict.fromkeys(_MODULES))  # type: ignore[arg-type]  # None says that there is no module
metadata.distribution = _distribution  # `version` calls it, wherever that was imported
ends = []
for arguments in json.loads(sys.argv[2]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(arguments)
    ends.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ends))
