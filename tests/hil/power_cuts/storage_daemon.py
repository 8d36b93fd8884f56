"""Runs qemu's storage daemon as a child process that ends with its parent: see `recording`."""

import os
import sys

from edgekit_runtime.system.child_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    os.execvp("qemu-storage-daemon", ["qemu-storage-daemon", *sys.argv[1:]])  # noqa: S606  # no shell
