"""Runs mosquitto as a child process that ends with its parent: `python -m ...mosquitto_child FILE`."""

import os
import sys

from edgekit_runtime.system.child_process import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # which outlasts the exec
    try:
        os.execvp("mosquitto", ["mosquitto", "-c", sys.argv[1]])  # noqa: S606 - no shell is wanted
    except FileNotFoundError:
        sys.exit("mosquitto is not installed; on Debian: apt install mosquitto")
