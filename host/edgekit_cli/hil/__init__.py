"""`edgekit hil`: benches and the tests that run on them. Each command is a file in this folder."""

import importlib.util

from edgekit_cli.lazy_commands import OrderedGroup, lazy_commands
from edgekit_runtime.errors import BenchError

# In the order of a first use. The text is what `edgekit hil --help` shows.
COMMANDS = {
    "init": "Describe a bench: the device, its power switch, its meter.",
    "run": "Run the tests on a bench, and keep the evidence.",
    "benches": "List the benches that need no hardware.",
    "repaired": "Mark a broken bench as repaired.",
    "image": "Make the images of the emulated devices.",
}


def check_installed() -> None:
    """Check that the packages that `edgekit hil` needs are installed.

    Raises:
        BenchError: labgrid or pytest is not installed.
    """
    missing = [name for name in ("labgrid", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        raise BenchError(
            f"{' and '.join(missing)} missing; install what a bench needs: pip install 'edgekit[hil]'"
        )


command = OrderedGroup(
    "hil",
    commands=lazy_commands(COMMANDS, __name__),
    help="Run the same tests on emulated devices and on yours, and keep what they have shown.",
    callback=check_installed,
)
