import io
import struct

import numpy as np
import pytest

from edgekit_runtime.codecs.media import MediaCodec, decode_media, encode_media
from edgekit_runtime.errors import DataError

pytest.importorskip("PIL")

PHOTOS = ("jpeg:90", "webp:80")


def photo(height: int = 48, width: int = 64) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows * 4, columns * 3, rows + columns], axis=-1).astype(np.uint8)


def sound(samples: int = 16_000) -> np.ndarray:
    seconds = np.arange(samples) / 16_000
    return (0.3 * np.sin(2 * np.pi * 440 * seconds)).astype(np.float32)


def decode(codec: str, data: bytes, max_bytes: int = 1 << 20) -> np.ndarray:
    dtype = "float32" if codec.startswith("opus") else "uint8"
    return decode_media(MediaCodec.parse(codec), data, dtype=dtype, max_bytes=max_bytes)


@pytest.mark.parametrize("codec", PHOTOS)
def test_photograph_comes_back_in_its_shape_and_nearly_its_values(codec: str) -> None:
    data = encode_media(MediaCodec.parse(codec), photo())
    decoded = decode(codec, data)
    assert (decoded.shape, decoded.dtype) == ((48, 64, 3), np.uint8)
    # Smooth colours: at these qualities both codecs keep them within a few steps of 256.
    assert np.abs(decoded.astype(int) - photo()).mean() < 4


@pytest.mark.parametrize("codec", PHOTOS)
def test_grey_photograph_comes_back_with_one_channel(codec: str) -> None:
    grey = photo()[:, :, :1]
    data = encode_media(MediaCodec.parse(codec), grey)
    decoded = decode_media(MediaCodec.parse(codec), data, dtype="uint8", max_bytes=grey.size, channels=1)
    assert decoded.shape == grey.shape
    assert np.abs(decoded.astype(int) - grey).mean() < 4
    with pytest.raises(DataError, match=f"{grey.size - 1} bytes"):
        decode_media(MediaCodec.parse(codec), data, dtype="uint8", max_bytes=grey.size - 1, channels=1)


def test_quality_decides_on_the_size() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for name, low, high in (("jpeg", 30, 95), ("webp", 30, 95)):
        sizes = [len(encode_media(MediaCodec.parse(f"{name}:{q}"), noise)) for q in (low, high)]
        assert sizes[0] < sizes[1]


@pytest.mark.parametrize("dtype", ["float32", "int16"])
@pytest.mark.parametrize("samples", [16_000, 15_999, 8_000, 961])
def test_sound_comes_back_in_its_length(dtype: str, samples: int) -> None:
    pytest.importorskip("soundfile")
    given = sound(samples) if dtype == "float32" else (sound(samples) * 32767).astype(np.int16)
    data = encode_media(MediaCodec.parse("opus:24"), given)
    decoded = decode_media(MediaCodec.parse("opus:24"), data, dtype=dtype)
    assert (decoded.shape, decoded.dtype) == (given.shape, given.dtype)
    scale = 1.0 if dtype == "float32" else 32767.0
    error = (decoded.astype(float) - given) / scale
    assert np.sqrt(np.mean(error[: samples // 2] ** 2)) < 0.05  # of a tone of 0.21 RMS


def test_bit_rate_decides_on_the_size_of_sound() -> None:
    pytest.importorskip("soundfile")
    noise = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    sizes = [len(encode_media(MediaCodec.parse(f"opus:{rate}"), noise)) for rate in (16, 64)]
    assert sizes[0] * 2 < sizes[1]


@pytest.mark.parametrize("codec", [*PHOTOS, "opus:24"])
def test_damaged_files_are_refused_or_read_and_nothing_else(codec: str) -> None:
    if codec.startswith("opus"):
        pytest.importorskip("soundfile")
    data = encode_media(MediaCodec.parse(codec), sound(4_000) if codec.startswith("opus") else photo())
    random = np.random.default_rng(0)
    for _ in range(200):
        damaged = bytearray(data)
        for at in random.integers(0, len(data), 3):
            damaged[at] = random.integers(0, 256)
        try:
            assert decode(codec, bytes(damaged)).nbytes <= 1 << 20
        except DataError:
            continue
    for end in (0, 1, 11, 29, len(data) // 3):
        with pytest.raises(DataError):
            decode(codec, data[:end])


@pytest.mark.parametrize("codec", PHOTOS)
def test_larger_photograph_than_allowed_is_refused_before_it_is_decoded(codec: str) -> None:
    data = encode_media(MediaCodec.parse(codec), photo(100, 100))
    assert decode(codec, data, 30_000).shape == (100, 100, 3)
    with pytest.raises(DataError, match="29999 bytes"):
        decode(codec, data, 29_999)


def test_jpeg_that_claims_huge_sizes_takes_no_memory() -> None:
    data = bytearray(encode_media(MediaCodec.parse("jpeg:90"), photo()))
    at = data.index(b"\xff\xc0") + 5
    struct.pack_into(">HH", data, at, 65_500, 65_500)
    with pytest.raises(DataError, match="65500 x 65500"):
        decode("jpeg", bytes(data))


def test_jpeg_of_a_thousand_scans_is_refused() -> None:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(photo()).save(file, "JPEG", progressive=True)
    data = file.getvalue()
    assert decode("jpeg", data).shape == (48, 64, 3)
    start = data.rindex(b"\xff\xda")
    with pytest.raises(DataError, match="scans"):
        decode("jpeg", data[:start] + data[start:-2] * 1000 + data[-2:])


def test_file_of_another_format_is_refused() -> None:
    webp = encode_media(MediaCodec.parse("webp"), photo())
    jpeg = encode_media(MediaCodec.parse("jpeg"), photo())
    for codec, data in (("jpeg", webp), ("webp", jpeg)):
        with pytest.raises(DataError):
            decode(codec, data)


def test_sound_longer_than_allowed_is_refused() -> None:
    pytest.importorskip("soundfile")
    data = encode_media(MediaCodec.parse("opus:24"), sound())
    with pytest.raises(DataError, match="16000 samples"):
        decode("opus", data, 63_999)


@pytest.mark.parametrize(
    "text", ["png", "jpeg:0", "jpeg:101", "jpeg:90@16000", "opus:5", "opus:24@44100", "", "jpeg:", "jpeg:9\n"]
)
def test_unknown_codecs_are_refused(text: str) -> None:
    with pytest.raises(DataError, match="codec"):
        MediaCodec.parse(text)


def test_arrays_of_another_kind_are_refused() -> None:
    for codec, array in (("jpeg", sound()), ("webp", photo()[..., :2]), ("opus", photo())):
        with pytest.raises(DataError, match="expected"):
            encode_media(MediaCodec.parse(codec), array)
