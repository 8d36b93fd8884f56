"""`python -m edgekit_toolkit` is `edgekit`."""

import sys

from edgekit_toolkit.cli import main

if __name__ == "__main__":
    sys.exit(main())
