"""The way of a request through our files: short, and as docs/architecture.md lists it.

`scripts/test tests/service/test_request_way.py -n 0 -s` prints the files in the order of the calls.
"""

import re
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from tests.runtime.conftest import PackageMaker
from tests.service.service_parts import make_config, running
from tests.service.test_run_memory import write_digits

import edgekit_runtime
from edgekit_runtime import Client
from edgekit_runtime.service.models.file_source import PackageFiles
from edgekit_runtime.service.options.model import ModelOptions, SchedulingLimits

MAX_FILES = 10
REQUESTS = 20
ROOT = Path(edgekit_runtime.__file__).parent
DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"


def trace_requests(maker: PackageMaker, folder: Path) -> list[tuple[str, ...]]:
    """Return the files that each of some inferences of the digits CNN crosses, in order."""
    write_digits(maker, folder / "digits.edgepkg", {})
    # However slow this machine is now, the model is one that runs on the thread of the loop.
    options = ModelOptions(scheduling=SchedulingLimits(short_s=1.0))
    config = make_config(folder, models={"digits": options}, listen={"host": ""})
    image: Any = np.zeros((1, 1, 8, 8), np.float32)
    ways = []
    crossed: dict[str, None] = {}

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            crossed.setdefault(path.relative_to(ROOT).as_posix())

    with (
        running(config, PackageFiles([folder], maker.trust)) as service,
        Client(service.socket_path) as client,
    ):
        for _ in range(5):
            client.infer("digits", {"image": image})
        for _ in range(REQUESTS):
            service.call(lambda: sys.setprofile(note))
            crossed.clear()
            client.infer("digits", {"image": image})
            service.call(lambda: sys.setprofile(None))
            ways.append(tuple(crossed))
    return ways


def find_usual(ways: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the most common way: some requests are looked at for drift, or meet the timer of deadlines."""
    return Counter(ways).most_common(1)[0][0]


def test_request_of_a_loaded_model_crosses_few_files_as_the_docs_list_them(
    maker: PackageMaker, tmp_path: Path
) -> None:
    way = find_usual(trace_requests(maker, tmp_path))
    print(*way, sep="\n")
    assert way[0] == "service/http/connection.py"
    assert "sessions/ort.py" in way
    assert len(way) <= MAX_FILES
    section = DOCS.read_text().split("## A request's way")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\S+\.py)` \|", section, re.MULTILINE)) == way
