"""A measuring process that states times in place of measuring: the default variant takes twice as long."""

import json

from edgekit_runtime.package.variants import DEFAULT_VARIANT
from edgekit_runtime.system.child_process import open_channel

if __name__ == "__main__":
    with open_channel() as channel, channel.makefile("rw", encoding="ascii") as lines:
        settings = json.loads(lines.readline())["settings"]
        times = [2e-3 if setting["variant"] == DEFAULT_VARIANT else 1e-3 for setting in settings]
        lines.write(json.dumps(times) + "\n")
