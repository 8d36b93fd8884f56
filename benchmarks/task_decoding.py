"""Times from outputs to answers of all tasks but detection, and of sound to inputs, in milliseconds.

Usage: scripts/python benchmarks/task_decoding.py
"""

from typing import Any

import numpy as np

from edgekit_runtime.package.manifest_entries import TaskChoice
from edgekit_runtime.preprocessing.features import FeatureRules
from edgekit_runtime.preprocessing.placement import Placement
from edgekit_runtime.preprocessing.resampling import resample
from edgekit_runtime.tasks.task import Context, read_task
from turns import median_ms

DRAW = np.random.default_rng(0)
PHOTO = Placement.of(640, 480).scaled_to(513, 385).moved(0, 64, 513, 513)
LARGE = Placement.of(4000, 3000).scaled_to(513, 385).moved(0, 64, 513, 513)
PATCHES = np.kron(DRAW.normal(size=(21, 9, 9)).astype(np.float32), np.ones((57, 57), np.float32))[None]
CHARACTERS = tuple(map(str, range(6624)))

CASES: dict[str, tuple[str, dict[str, Any], np.ndarray, Context]] = {
    "segmentation [1, 21, 513, 513], PNG of 640 x 480": (
        "segmentation",
        {},
        PATCHES,
        Context(placement=PHOTO),
    ),
    "the same, run lengths": ("segmentation", {"form": "rle"}, PATCHES, Context(placement=PHOTO)),
    "the same, PNG of 2048 x 1536 for 4000 x 3000": ("segmentation", {}, PATCHES, Context(placement=LARGE)),
    "keypoints, heatmaps [1, 17, 64, 48]": (
        "keypoints",
        {"form": "heatmaps"},
        DRAW.random((1, 17, 64, 48), np.float32),
        Context(placement=PHOTO),
    ),
    "text [1, 40, 6625]": ("text", {}, DRAW.random((1, 40, 6625), np.float32), Context(labels=CHARACTERS)),
    "sound events [1, 100, 521], noise": (
        "sound_events",
        {"hop_s": 0.5},
        DRAW.random((1, 100, 521), np.float32),
        Context(),
    ),
    "embedding [1, 512]": ("embedding", {}, DRAW.normal(size=(1, 512)).astype(np.float32), Context()),
}


def main() -> None:
    floats = DRAW.random(100_000, np.float32)
    print(f"sorting 100,000 floats: {median_ms(lambda: np.sort(floats)):.2f} ms")
    for name, (task, stated, output, context) in CASES.items():
        record, options = read_task(TaskChoice(task, stated))
        own_ms = median_ms(lambda: record.decode({"y": output}, options, context))  # noqa: B023
        print(f"{name}: {own_ms:.2f} ms")
    second = DRAW.normal(size=48_000).astype(np.float32)
    mfcc = FeatureRules(kind="mfcc", frame=480, hop=320, coefficients=10)
    print(f"a second from 48 to 16 kHz: {median_ms(lambda: resample(second, 48_000, 16_000)):.2f} ms")
    print(f"MFCC [49, 10] of a second: {median_ms(lambda: mfcc.compute(second[:16_000], 16_000)):.2f} ms")


if __name__ == "__main__":
    main()
