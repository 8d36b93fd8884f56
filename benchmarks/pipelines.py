"""What a pipeline costs beside its models, asked one after the other in the same process.

    scripts/python benchmarks/pipelines.py [--rounds 60] [--photos 12]

Detector: YOLOX-nano; MobileNet v1 0.25 classifies a crop of each box (../shared/models). Where these are
absent, the small models of the tests. Both sides get decoded pictures and take turns, picture by picture, in
one thread whose processor time counts, so the ratio holds at any load. The models' side is prepare, run and
decode of each; the pipeline adds the picture as an array, the crops and the answer as JSON.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from PIL import Image
from tests.runtime.conftest import PackageMaker, make_maker
from tests.service.answer_parts import draw
from tests.service.pipeline_parts import write_members, write_pipeline

from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.manifest import TaskChoice
from edgekit_runtime.package.pipeline import Stage
from edgekit_runtime.pipelines.member import PipelineMember, open_member
from edgekit_runtime.sessions import open_session
from edgekit_toolkit.onnx_graph.specs import tensor_specs
from edgekit_toolkit.samples.generated import bind_dims, generate_feeds
from results import make_parser
from serving import write_signed
from works import SHARED

STAGES = (Stage(name="detector"), Stage(name="shade", input="detector", crop="boxes"))
DETECTOR = SHARED / "detection" / "yolox_nano_fp32.onnx"
CLASSIFIER = SHARED / "models" / "mobilenet_v1_025_224_fp32.onnx"
PHOTOS = SHARED / "detection" / "coco128" / "images"
LETTERBOX = {"letterbox": 416, "align": "corner", "colour": "BGR", "scale": 1}
MOBILENET = {"resize": [224, 224], "scale": 1 / 127.5, "mean": 1.0, "layout": "NHWC"}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--photos", type=int, default=12)
    arguments = parser.parse_args()
    maker = make_maker()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        is_real = DETECTOR.exists()
        paths = write_real(maker, folder) if is_real else write_members(maker, folder)
        pictures = load_photos(arguments.photos) if is_real else [draw(red=(0, 0), green=(1, 1))]
        path = write_pipeline(maker, folder, STAGES, paths)
        members = {}
        for stage, member in paths.items():
            with read_package(member, maker.trust) as package:
                members[stage] = open_member(stage, package, threads=1)
        with read_package(path, maker.trust) as package:
            session = open_session(package, threads=1)
        rows = [measure(session, members, picture, arguments.rounds) for picture in pictures]
    print("boxes  crops  models ms  pipeline ms  ratio  over ms")
    for row in rows:
        print(
            "{boxes:5}  {crops:5}  {models:9.3f}  {pipeline:11.3f}  {ratio:5.3f}  {over:7.3f}".format(**row)
        )
    for figure in ("ratio", "over"):
        values = [row[figure] for row in rows]
        print(f"{figure}: median {statistics.median(values):.3f}, worst {max(values):.3f}")


def write_real(maker: PackageMaker, folder: Path) -> dict[str, Path]:
    detection = TaskChoice("detection", {"layout": "grid", "min_score": 0.3})
    return {
        "detector": write_with_task(maker, DETECTOR, folder, detection, LETTERBOX),
        "shade": write_with_task(
            maker, CLASSIFIER, folder, TaskChoice("classification", {"background": 1}), MOBILENET
        ),
    }


def write_with_task(
    maker: PackageMaker, model: Path, folder: Path, task: TaskChoice, rules: Mapping[str, Any]
) -> Path:
    source = onnx.load(model)
    (feeds,) = generate_feeds(tensor_specs(source)[0], 1, 0, bind_dims(source))
    content = model.read_bytes()
    return write_signed(folder, model.stem, content, feeds, maker.signer, task=task, preprocessing=rules)


def load_photos(count: int) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    paths = sorted(PHOTOS.glob("*.jpg"))[:count]
    return [np.asarray(Image.open(path).convert("RGB")) for path in paths]


def measure(
    session: Any, members: Mapping[str, PipelineMember], picture: np.ndarray[Any, Any], rounds: int
) -> dict[str, Any]:
    inputs, image = {"image": picture[None]}, Image.fromarray(picture)
    answer = json.loads(session.run(inputs)["answer_json"].tobytes())
    boxes = [entry["box"] for entry in answer["detections"] if "shade" in entry]
    corners = [
        (int(left), int(top), -int(-right // 1), -int(-bottom // 1)) for left, top, right, bottom in boxes
    ]
    crops = [image.crop(box) for box in corners]
    times: dict[str, list[float]] = {"models": [], "pipeline": []}
    for index in range(rounds):
        for side in ("models", "pipeline") if index % 2 else ("pipeline", "models"):
            begin_s = time.thread_time()
            if side == "models":
                members["detector"].answer([(image, (0, 0))])
                members["shade"].answer((crop, (0, 0)) for crop in crops)
            else:
                session.run(inputs)
            times[side].append((time.thread_time() - begin_s) * 1e3)
    models, pipeline = statistics.median(times["models"]), statistics.median(times["pipeline"])
    over = statistics.median(
        own - alone for own, alone in zip(times["pipeline"], times["models"], strict=True)
    )
    return {
        "boxes": len(answer["detections"]),
        "crops": len(crops),
        "models": models,
        "pipeline": pipeline,
        "ratio": pipeline / models,
        "over": over,
    }


if __name__ == "__main__":
    main()
