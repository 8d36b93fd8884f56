"""`python -m edgekit_toolkit` is `edgekit`."""

import os
import signal
import sys

# Until `main` answers it, an interrupt ends the process quietly: half an import has no story to tell.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from edgekit_toolkit.cli import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    code = main()
    # Python ends a module by SIGINT if an interrupt struck in code that it made from a string, such as that
    # of a dataclass, also when it was answered; the next such code clears that.
    exec("")  # noqa: S102
    sys.exit(code)
