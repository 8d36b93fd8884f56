"""`python -m edgekit_toolkit` is `edgekit`."""

import os
import signal
import sys

# Until `main` answers it, an interrupt ends the process quietly: half an import has no story to tell.
signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from edgekit_toolkit.cli import main  # noqa: E402

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main())
