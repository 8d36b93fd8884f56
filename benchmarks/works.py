"""Models with their samples as .npz, and what the quantization benchmark asks of each. It runs no model.

A work whose model, data or library is absent raises `MissingError`; the caller skips it with its message.
"""

import io
import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray

from public_models import CACHE, MODELS, TINY, MissingError

Arrays = Mapping[str, NDArray[Any]]

HERE = Path(__file__).resolve().parent
SHARED = HERE.parent.parent / "shared" / "models"


@dataclass(frozen=True)
class Work:
    """One model with its task.

    Attributes:
        name: for --only.
        metric: a function of metrics.py.
        budget: points that the best per-channel PTQ is below fp32 -> text for `edgekit package --budget`.
        goals: figure of `results.Row` -> the most that our package may have.
        find_model: path of the fp32 source.
        load: samples for calibration and for evaluation, each input name -> array [samples, ...] and, with
            labels, `y`.
        samples: what they are, for the table.
        vendor: the vendor's own int8 file, or None.
    """

    name: str
    metric: str
    budget: Callable[[float], str]
    goals: Mapping[str, float]
    find_model: Callable[[], Path]
    load: Callable[[], tuple[Arrays, Arrays]]
    samples: str
    vendor: str | None = None

    def prepare(self) -> tuple[Path, Path, Path]:
        """Paths of the model and of the two .npz, which are written again."""
        return self.find_model(), *_write(self.name, self.load())

    @property
    def vendor_bytes(self) -> int:
        return _shared(f"models/{self.vendor}").stat().st_size


def _write(name: str, parts: tuple[Arrays, Arrays]) -> tuple[Path, Path]:
    CACHE.mkdir(exist_ok=True)
    paths = (CACHE / f"{name}.calibration.npz", CACHE / f"{name}.evaluation.npz")
    for path, arrays in zip(paths, parts, strict=True):
        np.savez(path, **arrays)  # type: ignore[arg-type]  # the stub takes the names for its own options
    return paths


def _shared(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        raise MissingError(f"there is no ../shared/models/{name}")
    return path


def _model(name: str) -> Callable[[], Path]:
    return lambda: _shared(f"models/{name}")


def _arrays(name: str) -> dict[str, NDArray[Any]]:
    with np.load(_shared(f"data/{name}.npz")) as data:
        return dict(data)


def _split(count: int, **arrays: NDArray[Any]) -> tuple[Arrays, Arrays]:
    """The first `count` samples for calibration, the rest for evaluation."""
    return (
        {name: array[:count] for name, array in arrays.items()},
        {name: array[count:] for name, array in arrays.items()},
    )


def _resnet8() -> tuple[Arrays, Arrays]:
    data = _arrays("cifar10_jpeg")
    calibration = {"input_1": data["calib_x"].astype(np.float32), "y": data["calib_y"]}
    return calibration, {"input_1": data["x"].astype(np.float32), "y": data["y"]}


def _dscnn() -> tuple[Arrays, Arrays]:
    data = _arrays("kws01_mfcc")
    return _split(100, input=(data["x"].astype(np.float32) - 83) * np.float32(0.584703), y=data["y"])


def _vww() -> tuple[Arrays, Arrays]:
    data = _arrays("vww_coco_train128")
    return _split(28, input_1=data["x"].astype(np.float32) / 255, y=data["y"])


def _photos() -> NDArray[np.float32]:
    """The photos: float32 [128, 224, 224, 3], range 0..255."""
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingError("decoding the photos needs Pillow") from error
    data = _arrays("photos128_224")
    files, offset = data["jpeg"].tobytes(), data["offset"]
    images = [Image.open(io.BytesIO(files[begin:end])) for begin, end in itertools.pairwise(offset)]
    return np.stack([np.asarray(image.convert("RGB"), np.float32) for image in images])


def _mobilenet() -> tuple[Arrays, Arrays]:
    return _split(32, input=_photos() / np.float32(127.5) - 1)


def _lite0() -> tuple[Arrays, Arrays]:
    return _split(32, input=np.ascontiguousarray(((_photos() - 127) / 128).transpose(0, 3, 1, 2)))


def _text() -> tuple[Arrays, Arrays]:
    try:
        from text_images import text_images
    except ImportError as error:
        raise MissingError("drawing the text images needs Pillow") from error
    return {"x": text_images(range(16))}, {"x": text_images(range(100, 112))}


def _near_best(size: str) -> Callable[[float], str]:
    """The size with the goal "within 1 point of the best per-channel PTQ"."""
    return lambda best_drop: f"{size},drop={max(best_drop, 0) + 1:.2f}%"


WORKS = (
    Work(
        name="ppocr_det",
        metric="mask_iou",
        budget=lambda _: "size=1.5MB,drop=3%",
        goals={
            "package_bytes": 1.5e6,
            "drop_points": 3.0,
            "latency_ratio": 0.66,
            "one_thread_ratio": 0.66,
            "seconds": 120,
        },
        find_model=next(model for model in MODELS if model.name == "ppocr_v4_det").path,
        load=_text,
        samples="16 + 12 synthetic text images, 640 x 640",
    ),
    Work(
        name="mobilenet_v1_025",
        metric="agreement",
        budget=_near_best("size=600kB"),
        goals={"behind_points": 1.0},
        find_model=_model("mobilenet_v1_025_224_fp32.onnx"),
        load=_mobilenet,
        samples="32 + 96 photos",
    ),
    Work(
        name="efficientnet_lite0",
        metric="agreement",
        budget=_near_best("size=5.1MB"),
        goals={"behind_points": 1.0, "package_bytes": 5.1e6},
        find_model=_model("efficientnet_lite0_fp32.onnx"),
        load=_lite0,
        samples="32 + 96 photos",
    ),
    Work(
        name="resnet8",
        metric="top1",
        budget=lambda _: "size=113kB,drop=0.3%",
        goals={"drop_points": 0.3, "vendor_share": 1.15},
        find_model=_model("resnet8_cifar10_fp32.onnx"),
        load=_resnet8,
        samples="200 + 2000 of CIFAR-10",
        vendor="resnet8_cifar10_int8.tflite",
    ),
    Work(
        name="dscnn",
        metric="top1",
        budget=lambda _: "size=62kB,drop=0.3%",
        goals={"drop_points": 0.3, "vendor_share": 1.15},
        find_model=_model("dscnn_kws_fp32.onnx"),
        load=_dscnn,
        samples="100 + 500 of Speech Commands",
        vendor="dscnn_kws_int8.tflite",
    ),
    Work(
        name="vww",
        metric="top1",
        budget=lambda _: "size=383kB,drop=0.3%",
        goals={"drop_points": 0.3, "vendor_share": 1.15},
        find_model=_model("mobilenetv1_025_vww_fp32.onnx"),
        load=_vww,
        samples="28 + 100 of COCO at 96 px",
        vendor="mobilenetv1_025_vww_int8.tflite",
    ),
)


class Subject(NamedTuple):
    """A model with its samples.

    Attributes:
        name: for --only.
        model: path of the ONNX model.
        calibration, evaluation: paths of the samples; labels are `y`.
        work: None for the models of models/tiny, and for mnist8.
    """

    name: str
    model: Path
    calibration: Path
    evaluation: Path
    work: Work | None = None

    @property
    def options(self) -> list[str]:
        """Options of `edgekit package` for the samples."""
        return ["--calibration", str(self.calibration), "--eval", str(self.evaluation)]


def list_subjects(only: Sequence[str] | None = ()) -> Iterator[Subject]:
    """Yield models/tiny, the works and mnist8, or those in `only`; absent ones are named and skipped."""
    prepare: dict[str, Callable[[], Subject]] = {
        path.stem: lambda path=path: Subject(
            path.stem, path, path.with_suffix(".calib.npz"), path.with_suffix(".eval.npz")
        )
        for path in sorted(TINY.glob("*.onnx"))
    }
    prepare |= {work.name: lambda work=work: Subject(work.name, *work.prepare(), work) for work in WORKS}
    prepare["mnist8"] = _mnist8
    for name, make in prepare.items():
        if only and name not in only:
            continue
        try:
            subject = make()
        except MissingError as missing:
            print(f"skipped {name}: {missing}", file=sys.stderr)
        else:
            yield subject


def _mnist8() -> Subject:
    model, data = _shared("models/mnist8_fp32.onnx"), _arrays("mnist_t10k_2000")
    name = onnx.load(model).graph.input[0].name
    parts = _split(200, **{name: data["x"][:, np.newaxis].astype(np.float32), "y": data["y"]})
    return Subject("mnist8", model, *_write("mnist8", parts))
