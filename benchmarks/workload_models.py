"""Models and samples of the offload workloads: weights and signals are seeded, photographs are real.

Bytes and times are measured on them. Where weights or signals are made up, accuracy means nothing.
"""

import telemetry_off  # noqa: F401

import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from graphs import GraphBuilder
from offload_bench import Feeds
from public_models import SHARED, TINY
from works import WORKS

SAMPLES = 16
EEG_HZ, EEG_CHANNELS, EEG_STEPS = 256, 16, 4096
AUDIO_HZ, AUDIO_SAMPLES = 16_000, 16_000
WINDOW, HOP, FREQUENCIES, MELS, CEPSTRA = 640, 320, 257, 40, 10  # of the model's MFCC: 40 ms, 20 ms
HEADS, HEAD_CHANNELS, CLASSES = 8, 256, 10
FEATURES = "Relu6__57:0"  # the last feature map of MobileNet v1: float32 [1, 256, 7, 7]


def sensor_tcn() -> tuple[bytes, list[Feeds]]:
    """Return a causal TCN that classifies 16 s of 16 channels at 256 Hz, and windows of a signal.

    Two strided convolutions make 8 x 256 of 16 x 4096 values; then come 12 residual blocks of 192 channels.

    Source: Bai et al., "An empirical evaluation of generic convolutional and recurrent networks", 2018.
    """
    build, width = GraphBuilder(), 192
    x = build.causal("series", (16, EEG_CHANNELS, 7), stride=4)
    x = build.causal(x, (8, 16, 5), stride=4)
    x = build.causal(x, (width, 8, 1))
    for block in range(12):
        y = build.causal(x, (width, width, 3), dilation=2 ** (block % 6))
        y = build.causal(y, (width, width, 3), dilation=2 ** (block % 6))
        x = build.add("Mul", [build.add("Add", [x, y]), build.weight(np.float32(0.5))])
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x])])
    y = build.add("MatMul", [x, build.random(width, 5)])
    model = build.model({"series": [1, EEG_CHANNELS, EEG_STEPS]}, {y: [1, 5]})
    draws = np.random.default_rng(1)
    return model.SerializeToString(), [{"series": _record_series(draws)} for _ in range(SAMPLES)]


def _record_series(draws: np.random.Generator) -> NDArray[np.float32]:
    """Return correlated noise as of an EEG, from a converter of 12 bits; deviation 20 steps."""
    white = draws.standard_normal((EEG_CHANNELS, EEG_STEPS))
    mixed = 0.6 * white + 0.4 * white.mean(axis=0) * np.sqrt(EEG_CHANNELS)
    spectrum = np.fft.rfft(mixed, axis=1)
    spectrum /= np.maximum(np.fft.rfftfreq(EEG_STEPS, 1 / EEG_HZ), 0.5)  # 1/f in amplitude
    series = np.fft.irfft(spectrum, EEG_STEPS, axis=1)
    codes = np.rint(series / series.std() * 20 + 0.8 * white).clip(-2048, 2047)
    return np.asarray(codes[np.newaxis] * 0.05, np.float32)


def tiny_tcn() -> tuple[bytes, list[Feeds]]:
    """Return the project's TCN of spoken vowels, with its own samples."""
    path = TINY / "japanese_vowels_tcn.onnx"
    with np.load(path.with_suffix(".eval.npz")) as found:
        series = found["cepstra"][:SAMPLES]
    return fix_batch(onnx.load(path)), [{"cepstra": one[np.newaxis]} for one in series]


def keyword_spotting() -> tuple[bytes, list[Feeds]]:
    """Return MFCC as nodes in front of DS-CNN, and one-second samples of voiced sound and noise.

    The Fourier transform is a convolution with 2 x 257 windowed waves, as exporters write it.
    """
    build = GraphBuilder()
    cepstra, frames = _add_mfcc(build, hop=HOP, kept=CEPSTRA)
    shaped = build.add("Reshape", [cepstra, build.weight(np.array([1, frames, CEPSTRA, 1]))])
    model = onnx.load_from_string(fix_batch(onnx.load(SHARED / "dscnn_kws_fp32.onnx")))
    for node in model.graph.node:
        node.input[:] = [shaped if name == "input" else name for name in node.input]
    front = build.model({"audio": [1, 1, AUDIO_SAMPLES]}, {})
    del model.graph.input[:]
    model.graph.input.extend(front.graph.input)
    model.graph.initializer.extend(build.weights)
    nodes = [*build.nodes, *model.graph.node]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model.SerializeToString(), _record_sounds()


def keyword_res15() -> tuple[bytes, list[Feeds]]:
    """Return the same in front of res15, with random weights: 45 maps, 13 dilated convolutions.

    Source: Tang, Lin, "Deep residual learning for small-footprint keyword spotting", ICASSP 2018, table 1.
    """
    build, maps = GraphBuilder(4), 45
    cepstra, frames = _add_mfcc(build, hop=HOP // 2, kept=MELS)
    x = build.add("Reshape", [cepstra, build.weight(np.array([1, 1, frames, MELS]))])
    x = build.add("Relu", [build.add("Conv", [x, build.random(maps, 1, 3, 3)], pads=[1, 1, 1, 1])])
    earlier = x
    for layer in range(13):
        wide = 2 ** (layer // 3)
        options = {"pads": [wide] * 4, "dilations": [wide] * 2}
        x = build.add("Relu", [build.add("Conv", [x, build.random(maps, maps, 3, 3)], **options)])
        if layer % 2:
            earlier = x = build.add("Mul", [build.add("Add", [x, earlier]), build.weight(np.float32(0.5))])
    x = build.add("Flatten", [build.add("GlobalAveragePool", [x])])
    y = build.add("MatMul", [x, build.random(maps, 12)])
    model = build.model({"audio": [1, 1, AUDIO_SAMPLES]}, {y: [1, 12]})
    return model.SerializeToString(), _record_sounds()


def _add_mfcc(build: GraphBuilder, *, hop: int, kept: int) -> tuple[str, int]:
    """Add the MFCC of `audio` [1, 1, samples]; return their name, [1, frames, kept], and the frames."""
    times = np.arange(WINDOW) / WINDOW
    waves = 2 * np.pi * np.arange(FREQUENCIES)[:, np.newaxis] * times
    waves = np.stack([np.cos(waves), np.sin(waves)]) * np.hanning(WINDOW)
    kernel = waves.reshape(2 * FREQUENCIES, 1, WINDOW).astype(np.float32)
    x = build.add("Conv", ["audio", build.weight(kernel)], strides=[hop])
    parts = build.add("Mul", [x, x])
    parts = build.add("Reshape", [parts, build.weight(np.array([1, 2, FREQUENCIES, -1]))])
    power = build.add("ReduceSum", [parts, build.weight(np.array([1]))], keepdims=0)
    power = build.add("Transpose", [power], perm=[0, 2, 1])
    mel = build.add("MatMul", [power, build.weight(_mel_filters())])
    log = build.add("Log", [build.add("Add", [mel, build.weight(np.float32(1e-6))])])
    angles = np.pi / MELS * np.outer(np.arange(MELS) + 0.5, np.arange(kept))
    cepstra = build.add("MatMul", [log, build.weight((np.cos(angles) / 4).astype(np.float32))])
    return cepstra, 1 + (AUDIO_SAMPLES - WINDOW) // hop


def _record_sounds() -> list[Feeds]:
    draws = np.random.default_rng(2)
    return [{"audio": _record_sound(draws)} for _ in range(SAMPLES)]


def _mel_filters() -> NDArray[np.float32]:
    """Return triangles [frequencies, mels] from 20 to 4,000 Hz."""
    edges = 700 * (np.exp(np.linspace(*np.log1p(np.array([20, 4000]) / 700), MELS + 2)) - 1)
    hertz = np.arange(FREQUENCIES)[:, np.newaxis] * AUDIO_HZ / WINDOW
    rising = (hertz - edges[:-2]) / np.diff(edges)[:-1]
    falling = (edges[2:] - hertz) / np.diff(edges)[1:]
    return np.maximum(np.minimum(rising, falling), 0).astype(np.float32)


def _record_sound(draws: np.random.Generator) -> NDArray[np.float32]:
    """Return one second like a spoken word in a room, with 16 bits."""
    seconds = np.arange(AUDIO_SAMPLES) / AUDIO_HZ
    pitch = 2 * np.pi * np.cumsum(120 + 40 * np.sin(2 * np.pi * draws.uniform(0.5, 3) * seconds)) / AUDIO_HZ
    voice = sum(np.sin(pitch * k + draws.uniform(0, 6)) / k for k in range(1, 20))
    loud = np.exp(-(((seconds - draws.uniform(0.3, 0.7)) / 0.2) ** 2))
    sound = 0.2 * voice * loud + 0.01 * draws.standard_normal(AUDIO_SAMPLES)
    return np.asarray(np.rint(sound.clip(-1, 1) * 32767) / 32768, np.float32).reshape(1, 1, -1)


def efficientnet() -> tuple[bytes, list[Feeds]]:
    """Return EfficientNet-Lite0, 18.6 MB, and photographs."""
    return photographed("efficientnet_lite0")


def mobilenet() -> tuple[bytes, list[Feeds]]:
    return photographed("mobilenet_v1_025")


def photographed(name: str) -> tuple[bytes, list[Feeds]]:
    work = next(work for work in WORKS if work.name == name)
    images = work.load()[0]["input"][:SAMPLES]
    return fix_batch(onnx.load(work.find_model())), [{"input": one[np.newaxis]} for one in images]


def many_heads() -> tuple[bytes, list[Feeds]]:
    """Return MobileNet v1 with eight heads of two convolutions at 14 x 14, all of which an application wants.

    The heads have random weights; the backbone and the photographs are real.
    """
    content, feeds = mobilenet()
    whole = onnx.shape_inference.infer_shapes(onnx.load_from_string(content))
    model = onnx.utils.Extractor(whole).extract_model(["input"], [FEATURES])
    build, outputs = GraphBuilder(3), {}
    for _ in range(HEADS):
        scales = build.weight(np.array([1, 1, 2, 2], np.float32))
        x = build.add("Resize", [FEATURES, "", scales], mode="nearest")
        for _ in range(2):
            shape = (HEAD_CHANNELS, HEAD_CHANNELS, 3, 3)
            x = build.add("Relu", [build.add("Conv", [x, build.random(*shape)], pads=[1, 1, 1, 1])])
        x = build.add("Flatten", [build.add("GlobalAveragePool", [x])])
        outputs[build.add("MatMul", [x, build.random(HEAD_CHANNELS, CLASSES)])] = [1, CLASSES]
    heads = build.model({}, outputs)
    model.graph.node.extend(heads.graph.node)
    model.graph.initializer.extend(heads.graph.initializer)
    del model.graph.output[:]
    model.graph.output.extend(heads.graph.output)
    return model.SerializeToString(), feeds


def fix_batch(model: onnx.ModelProto) -> bytes:
    """Return a model that takes one sample a request, without nodes that only compute shapes."""
    del model.graph.value_info[:]
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if not dim.HasField("dim_value"):
                dim.dim_value = 1
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder, "fixed.onnx"))
        onnxruntime.InferenceSession(model.SerializeToString(), options)
        return Path(options.optimized_model_filepath).read_bytes()
