"""Install the package PACKAGE by the command line, and print the JSON of that in a line.

Another program follows in the same process: where a Python is emulated, its start and the import of an engine
take longer than what they do.
"""

import contextlib
import io
import json
import sys

from edgekit_runtime.cli import main as run_command


def main() -> None:
    """Install and print."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = run_command(["install", sys.argv[1], "--json"])
    if code:
        sys.exit(code)
    print(json.dumps(json.loads(printed.getvalue())))


if __name__ == "__main__":
    main()
