"""Runs `edgekit-device` as a child that ends with its parent: `python -m ...device_process ARGUMENT...`."""

import sys

from edgekit_runtime.cli import main
from edgekit_runtime.system.child_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    sys.exit(main(sys.argv[1:]))
