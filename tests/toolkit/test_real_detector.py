"""The data set and the metric on a real detector, where its folder is there."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import onnxruntime
import pytest

from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.evaluation.average_precision import mean_precisions
from edgekit_toolkit.evaluation.metrics import SetMetric, find_metric
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data
from edgekit_toolkit.samples.truth import TrueBoxes

FOLDER: Final = Path(__file__).parents[3] / "shared" / "models" / "detection"
RULES: Final[Mapping[str, Any]] = {"letterbox": 416, "align": "corner", "colour": "BGR", "scale": 1}


@pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the real detector in ../shared/models")
def test_float_detector_has_its_known_precision_on_every_other_photograph() -> None:
    session = onnxruntime.InferenceSession(FOLDER / "yolox_nano_fp32.onnx")
    (value,) = session.get_inputs()
    source = open_data(
        FOLDER / "coco128",
        [TensorSpec(value.name, "float32", (1, 3, 416, 416))],
        decoding=Decoding(RULES),
    )
    task = TaskChoice("detection", {"layout": "grid"})
    matches = []
    for index, (feeds, labels) in enumerate(source.stream()):
        if index % 2 and labels is not None:
            outputs = {"output": session.run(None, feeds)[0]}
            metric = find_metric("map50", outputs, labelled=True, truth=TrueBoxes, task=task)
            assert isinstance(metric, SetMetric)
            matches.append(metric.reduce(outputs, labels[0]))

    assert len(matches) == 64
    assert mean_precisions(matches)[0] == pytest.approx(0.48, abs=0.03)  # 0.485 by another evaluation
