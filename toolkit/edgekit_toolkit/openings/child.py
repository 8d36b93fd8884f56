"""The process that opens models: `python -m edgekit_toolkit.openings.child CHANNEL`, see `first_opening`.

For each request, a line of JSON, it opens a model as a device would, and answers with an empty object whether
or not the engine refused it.
"""

import contextlib
import json
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgekit_runtime.sessions.options import read_options
from edgekit_runtime.system.child_process import open_channel


def _open(request: Mapping[str, Any]) -> None:
    with Path(request["model"]).open("rb") as file:
        model = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    if request["engine"] == "litert":
        from edgekit_runtime.sessions.litert.session import LiteRtOptions, LiteRtSession

        LiteRtSession(model, LiteRtOptions(threads=1)).close()
    else:
        from edgekit_runtime.sessions.ort import OrtOptions, OrtSession

        OrtSession(model, read_options(OrtOptions, "ort", request["options"], 1)).close()


if __name__ == "__main__":
    with open_channel() as channel, channel.makefile("rb") as requests:
        for line in requests:
            with contextlib.suppress(Exception):  # an engine that only refuses a model
                _open(json.loads(line))
            channel.sendall(b"{}\n")
