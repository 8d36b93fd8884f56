"""Photographs as samples: what the preprocessing makes of each kind of file, and what is refused."""

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.toolkit.cases import cases

from edgekit_runtime.errors import DataError
from edgekit_runtime.preprocessing.rules import PRESETS
from edgekit_runtime.tensors import TensorSpec
from edgekit_toolkit.packaging.attachments import read_preprocessing
from edgekit_toolkit.samples.media import decoding as decoding_module
from edgekit_toolkit.samples.media.decoding import Decoding
from edgekit_toolkit.samples.source import open_data

NCHW = (TensorSpec("image", "float32", ("N", 3, 8, 8)),)
NHWC = (TensorSpec("image", "float32", ("N", 8, 8, 3)),)
GREY = (TensorSpec("image", "float32", ("N", 1, 8, 8)),)
FREE = (TensorSpec("image", "float32", ("N", 3, "h", "w")),)
PIXELS = {"scale": 1}
SQUARE = {"scale": 1, "resize": [8, 8]}


def picture(height: int = 8, width: int = 8, seed: int = 0, channels: int = 3) -> Any:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def saved(path: Path, pixels: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def one(path: Path, inputs: Any, preprocessing: Any) -> Any:
    """The only sample of a file."""
    ((feeds, _),) = open_data(path, inputs, decoding=Decoding(preprocessing)).stream(1)
    return feeds[inputs[0].name][0]


def test_imagenet_preset_gives_what_torchvision_gives(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", picture(300, 400))
    spec = (TensorSpec("image", "float32", ("N", 3, 224, 224)),)
    got = one(path, spec, PRESETS["imagenet"])
    # Resize(256): 341 = int(256 * 400 / 300). CenterCrop(224): rows from round(16), columns from round(58.5).
    with Image.open(path) as image:
        resized = np.asarray(image.resize((341, 256), Image.Resampling.BILINEAR))
    unit = resized[16:240, 58:282].astype(np.float32) / np.float32(255)
    mean, std = np.float32([0.485, 0.456, 0.406]), np.float32([0.229, 0.224, 0.225])
    # torchvision rounds after each step, in float32; here only the result is rounded.
    np.testing.assert_allclose(got, ((unit - mean) / std).transpose(2, 0, 1), atol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("is_wide", [False, True])
def test_thin_image_is_resized_no_further_than_its_crop(tmp_path: Path, is_wide: bool) -> None:
    pixels = np.zeros((60000, 1, 3), np.uint8)
    pixels[29_990:30_010] = 200
    path = saved(tmp_path / "a.png", pixels.transpose(1, 0, 2) if is_wide else pixels)
    got = one(path, NCHW, {"scale": 1, "resize": 8000, "center_crop": 8})
    assert (got == 200).all()
    with pytest.raises(DataError, match="480000000 x 8000; cut it, or set 'center_crop'"):
        one(path, FREE, {"scale": 1, "resize": 8000})


def test_crop_of_a_smaller_image_has_black_borders(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", np.full((5, 8, 3), 200, np.uint8))
    got = one(path, NCHW, {"scale": 1, "center_crop": 8})
    assert got[0, :, 0].tolist() == [0, 200, 200, 200, 200, 200, 0, 0]


def test_layout_and_order_of_colours_are_those_asked_for(tmp_path: Path) -> None:
    pixels = picture()
    path = saved(tmp_path / "a.png", pixels)
    assert np.array_equal(one(path, NCHW, PIXELS), pixels.transpose(2, 0, 1))
    assert np.array_equal(one(path, NHWC, PIXELS), pixels)
    assert np.array_equal(one(path, NHWC, PIXELS | {"colour": "BGR"}), pixels[:, :, ::-1])
    means = PIXELS | {"colour": "BGR", "mean": [1, 2, 3], "std": [1, 2, 4]}
    assert np.array_equal(one(path, NHWC, means), (pixels[:, :, ::-1] - np.float32([1, 2, 3])) / [1, 2, 4])


def test_int8_input_takes_pixels_less_128(tmp_path: Path) -> None:
    pixels = picture()
    spec = (TensorSpec("image", "int8", (1, 8, 8, 3)),)
    got = one(saved(tmp_path / "a.png", pixels), spec, {"scale": 1, "mean": 128})
    assert np.array_equal(got, pixels.astype(int) - 128)
    assert got.dtype == np.int8


def test_values_beyond_the_integer_input_are_refused(tmp_path: Path) -> None:
    spec = (TensorSpec("image", "int8", (1, 8, 8, 3)),)
    with pytest.raises(DataError, match="values from 0 to 255, beyond int8"):
        one(saved(tmp_path / "a.png", picture()), spec, PIXELS)


def test_palette_alpha_grey_and_cmyk_images_become_rgb(tmp_path: Path) -> None:
    pixels = np.zeros((8, 8, 3), np.uint8)
    pixels[:4] = [255, 0, 0]
    red = Image.fromarray(pixels)
    grey = saved(tmp_path / "grey.png", np.full((8, 8), 90, np.uint8))
    red.quantize(4).save(tmp_path / "palette.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.convert("CMYK").save(tmp_path / "cmyk.jpg", quality=100)
    assert np.unique(one(grey, NCHW, PIXELS)).tolist() == [90]
    assert np.array_equal(one(tmp_path / "palette.png", NHWC, PIXELS), pixels)
    assert np.array_equal(one(tmp_path / "alpha.png", NHWC, PIXELS), pixels)
    assert np.abs(one(tmp_path / "cmyk.jpg", NHWC, PIXELS) - pixels).max() <= 4  # JPEG is lossy


def test_grey_model_takes_colour_images_and_16_bits(tmp_path: Path) -> None:
    deep = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000
    assert np.array_equal(one(saved(tmp_path / "deep.png", deep), GREY, PIXELS)[0], deep >> 8)
    white = saved(tmp_path / "white.png", np.full((8, 8, 3), 255, np.uint8))
    assert np.unique(one(white, GREY, PIXELS)).tolist() == [255]


def test_photograph_is_turned_upright_by_its_exif_data(tmp_path: Path) -> None:
    pixels = picture(8, 6)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it rotated by 90 degrees clockwise
    path = saved(tmp_path / "a.png", pixels, exif=exif)
    assert np.array_equal(one(path, FREE, PIXELS), np.rot90(pixels, -1).transpose(2, 0, 1))


def test_images_of_several_sizes_are_fed_alone_where_the_model_leaves_them_free(tmp_path: Path) -> None:
    for number, size in enumerate([(8, 8), (8, 8), (6, 9)]):
        saved(tmp_path / f"{number}.png", picture(*size))
    source = open_data(tmp_path, FREE, decoding=Decoding(PIXELS))
    assert [feeds["image"].shape for feeds, _ in source.stream(4)] == [(2, 3, 8, 8), (1, 3, 6, 9)]


def test_unusable_files_are_named_together(tmp_path: Path) -> None:
    whole = io.BytesIO()
    Image.fromarray(picture(64, 64)).save(whole, "JPEG")
    (tmp_path / "cut.jpg").write_bytes(whole.getvalue()[:700])
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "text.png").write_text("no image")
    saved(tmp_path / "good.png", picture())
    saved(tmp_path / "small.png", picture(4, 4))
    with pytest.raises(DataError, match="4 of 5 files cannot be used") as caught:
        list(open_data(tmp_path, NCHW, decoding=Decoding(PIXELS)).stream(1))
    for text in ("cut.jpg: is damaged", "empty.jpg: is no image", "text.png: is no image"):
        assert text in str(caught.value)
    assert "small.png: has shape [3, 4, 4] after the preprocessing" in str(caught.value)


def test_image_that_unpacks_to_gigabytes_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """A PNG of a few bytes whose header claims 60,000 x 60,000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + content)
    with pytest.raises(DataError, match=r"bomb.png: has over 89 million pixels"):
        one(tmp_path / "bomb.png", NCHW, SQUARE)


def test_files_are_decoded_when_they_are_asked_for_and_progress_is_told(tmp_path: Path) -> None:
    for number in range(6):
        saved(tmp_path / f"{number}.png", picture(seed=number))
    told: list[tuple[int, int]] = []
    source = open_data(tmp_path, NCHW, decoding=Decoding(PIXELS, progress=lambda *step: told.append(step)))
    stream = source.stream(1)
    next(stream)
    assert told == [(1, 6), (2, 6)]  # a stream reads one sample ahead
    list(stream)
    assert told == [(count, 6) for count in range(1, 7)]


def test_only_so_many_decoded_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding_module, "KEPT_BYTES", 3 * 8 * 8 * 3)
    pictures = [picture(seed=number) for number in range(4)]
    for number, pixels in enumerate(pictures):
        saved(tmp_path / f"{number}.png", pixels)
    source = open_data(tmp_path, NHWC, decoding=Decoding(PIXELS))
    digest = source.sha256
    for path in tmp_path.iterdir():
        path.unlink()
    stream = source.stream(1)
    for pixels in pictures[:2]:  # a stream reads one sample ahead: three were kept
        assert np.array_equal(next(stream)[0]["image"][0], pixels)
    with pytest.raises(DataError, match=r"3.png: cannot be read: No such file"):
        next(stream)
    assert len(digest) == 64


@cases(
    ("fields", "message"),
    [
        ({}, "'scale' is missing; 0.00392156862745098 turns pixels 0..255 into 0..1"),
        ({"scale": "1/255"}, "scale is '1/255', expected a number"),
        ({"scale": 1, "reszie": 8}, "unknown field 'reszie'.*Did you mean 'resize'"),
        ({"scale": 1, "resize": 0}, r"resize\[0\] is 0, expected 1 to 16384"),
        (
            {"scale": 1, "center_crop": [1, 2, 3]},
            "center_crop: expected a list of 2 values",
        ),
        ({"scale": 1, "mean": [1, 2]}, r"mean is \[1, 2\].*a list of 3"),
        ({"scale": 1, "std": [1, 0, 1]}, "std holds 0, by which values are divided"),
        ({"scale": 1, "interpolation": "sinc"}, "interpolation is 'sinc', expected one of bilinear"),
        ({"scale": 1, "dtype": "uint8"}, '\'dtype\' is "uint8", expected "float32"'),
        ({"scale": 1, "colour": "L"}, "'colour' is \"L\", expected one of 3 channels"),
        ({"type": "video"}, "'type' is \"video\""),
        ({"type": "audio", "sample_rate": 8000}, "takes no sound"),
    ],
)
def test_wrong_preprocessing_is_refused_by_its_field(fields: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        one(saved(tmp_path / "a.png", picture()), NCHW, fields)


@pytest.mark.parametrize(("inputs", "layout"), [(NCHW, "NCHW"), (NHWC, "NHWC"), (GREY, "NCHW")])
def test_error_without_preprocessing_shows_one_that_works(inputs: Any, layout: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", picture(20, 30))
    with pytest.raises(DataError, match=r"--preprocessing FILE.json") as caught:
        one(path, inputs, None)
    text = str(caught.value)
    example = json.loads(text[text.index("{") : text.rindex("}") + 1])
    assert example["layout"] == layout
    assert one(path, inputs, example).shape == inputs[0].shape[1:]


def test_model_without_an_image_input_says_so(tmp_path: Path) -> None:
    path = saved(tmp_path / "a.png", picture())
    spec = (TensorSpec("x", "float32", ("N", 7)),)
    with pytest.raises(DataError, match="which is no image; preprocess the files yourself"):
        one(path, spec, None)
    pair = (*NCHW, TensorSpec("other", "float32", ("N", 2)))
    with pytest.raises(DataError, match="one file a sample suits models with one batched input"):
        one(path, pair, PIXELS)


def test_preset_travels_as_its_fields(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"preset": "imagenet", "resize": 232}')
    fields = read_preprocessing(tmp_path / "p.json")
    assert fields == {**PRESETS["imagenet"], "resize": 232}
    assert read_preprocessing(Path("imagenet")) == PRESETS["imagenet"]
    (tmp_path / "p.json").write_text('{"preset": "imagnet"}')
    with pytest.raises(DataError, match="there is no preset 'imagnet', expected one of imagenet"):
        read_preprocessing(tmp_path / "p.json")
