"""Runs `edgekit` as `python -m edgekit_cli`."""

import os
import signal
import sys

# Until `main` handles it, an interrupt ends the process quietly: a traceback of an import helps nobody.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from edgekit_cli.cli import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    # Python ends with SIGINT after an interrupt in generated code, such as that of a dataclass, even if it
    # was handled; the next generated code clears that.
    exec("")  # noqa: S102
    sys.exit(code)
