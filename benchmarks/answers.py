"""What the service adds to a photograph that is decoded, run and decoded by hand.

    scripts/python benchmarks/answers.py MODEL.onnx [--preprocessing JSON] [--task NAME] [--options JSON]
        [--rounds 200]

A JPEG of 640 x 480 goes to `POST …/answer` over the Unix socket; in turns this process does the same by hand
with one thread: decode the file, resize it and bring its values into the model's form, run the model, decode
and suppress the boxes (or rank the classes), write the answer as JSON. A user without the service needs all
of that, so it is what "decode + model" means: "by hand" has no HTTP, no queue and no other thread, and uses
our own preprocessing and decoding. "added" is the difference of the medians: the way of the file and the
answer between two processes, and all that the service does beside these steps.

Every figure is of this machine and this run: compare ratios.
"""

import io
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from edgekit_runtime import Client
from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.media import MediaType
from edgekit_runtime.preprocessing.rules import read_rules
from edgekit_runtime.sessions.ort import OrtOptions, OrtSession
from edgekit_runtime.tasks.answerer import Answerer
from edgekit_runtime.tasks.task import read_task
from edgekit_toolkit.packaging.signing_keys import load_signer
from results import make_parser
from serving import serving, write_signed
from turns import take_turns


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--preprocessing", type=json.loads, default={"scale": 1})
    parser.add_argument("--task", default="detection")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--rounds", type=int, default=200)
    arguments = parser.parse_args()
    session = OrtSession(arguments.model, OrtOptions(threads=1))
    (spec,) = session.inputs
    choice = TaskChoice(arguments.task, arguments.options)
    task, options = read_task(choice)
    rules = read_rules(arguments.preprocessing, spec)
    answerer = Answerer(spec, rules=rules, task=task, options=options)
    photo, jpeg = draw_photo(), MediaType("image/jpeg")
    steps: dict[str, list[float]] = {}

    def answer_by_hand() -> None:
        begin_s = time.perf_counter()
        prepared = answerer.prepare(photo, jpeg, 1 << 24)
        prepared_s = time.perf_counter()
        outputs = session.run(prepared.inputs)
        run_s = time.perf_counter()
        json.dumps(answerer.answer(outputs, prepared.placement))
        for name, seconds in (
            ("prepare", prepared_s - begin_s),
            ("run", run_s - prepared_s),
            ("answer", time.perf_counter() - run_s),
        ):
            steps.setdefault(name, []).append(seconds)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        feeds = answerer.prepare(photo, jpeg, 1 << 24).inputs
        package = write_signed(
            folder,
            "model",
            arguments.model.read_bytes(),
            feeds,
            load_signer(folder=folder / "keys"),
            task=choice,
            preprocessing=arguments.preprocessing,
        )
        with serving(folder, package) as service, Client(service.path) as client:
            stated: dict[str, list[float]] = {}

            def ask() -> None:
                for step, value in client.answer("model", photo)["times_ms"].items():
                    stated.setdefault(step, []).append(value)

            calls = {"by hand": answer_by_hand, "service": ask}
            times = take_turns(calls, arguments.rounds)
    medians = {key: 1e3 * statistics.median(seconds) for key, seconds in times.items()}
    figures: dict[str, Any] = {
        "load_average": os.getloadavg()[0],
        "jpeg_bytes": len(photo),
        **{f"{key} ms": round(value, 3) for key, value in medians.items()},
        "added ms": round(medians["service"] - medians["by hand"], 3),
        "steps of the service ms": {key: statistics.median(values) for key, values in stated.items()},
        "steps by hand ms": {key: round(statistics.median(value) * 1e3, 3) for key, value in steps.items()},
    }
    print(json.dumps(figures, indent=2))


def draw_photo() -> bytes:
    """Return a JPEG of smooth colours with some noise, as large as a photograph of its size."""
    draws = np.random.default_rng(0)
    image = Image.fromarray(draws.integers(0, 256, (24, 32, 3), np.uint8)).resize((640, 480))
    pixels = np.asarray(image).astype(np.int16) + draws.normal(0, 12, (480, 640, 3)).astype(np.int16)
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=88)
    return file.getvalue()


if __name__ == "__main__":
    main()
