"""No byte of a package is free: whichever is changed, reading it fails."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgekit_runtime.errors import PackageError
from edgekit_runtime.package.archive import read_package, write_package


def undetected(path: Path, maker: Any, flips: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the flips (offset, mask) after which the package still reads; leave the file as it was."""
    data = path.read_bytes()
    missed = []
    with path.open("r+b", buffering=0) as file:
        for offset, mask in flips:
            file.seek(offset)
            file.write(bytes([data[offset] ^ mask]))
            try:
                read_package(path, maker.trust).close()
            except PackageError:
                pass
            else:
                missed.append((offset, mask))
            file.seek(offset)
            file.write(data[offset : offset + 1])
    assert path.read_bytes() == data
    return missed


@pytest.fixture(scope="module")
def large_path(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    artifacts = {**maker.artifacts, "model.onnx": random.Random(5).randbytes(300_000)}
    path = tmp_path_factory.mktemp("large") / "large.edgepkg"
    write_package(path, maker.manifest(artifacts), artifacts, maker.signer)
    return path


def test_a_flip_of_one_bit_of_any_byte_is_detected(maker: Any, package_path: Path) -> None:
    rng = random.Random(1)
    size_bytes = package_path.stat().st_size
    flips = ((offset, 1 << rng.randrange(8)) for offset in range(size_bytes))
    assert undetected(package_path, maker, flips) == []


def test_another_value_of_any_byte_is_detected(maker: Any, package_path: Path) -> None:
    rng = random.Random(2)
    flips = ((offset, rng.randrange(1, 256)) for offset in range(package_path.stat().st_size))
    assert undetected(package_path, maker, flips) == []


def test_each_bit_of_the_envelope_and_the_headers_around_it_is_covered(
    maker: Any, package_path: Path
) -> None:
    layout = maker.layout(package_path.read_bytes())
    start, end = layout["signature.dsse.json"].header_offset, layout["golden/x.bin"].payload_offset
    flips = ((offset, 1 << bit) for offset in range(start, end) for bit in range(8))
    assert undetected(package_path, maker, flips) == []


@pytest.mark.parametrize("single_bit", [True, False])
def test_random_flips_in_a_larger_package_are_detected(
    single_bit: bool, maker: Any, large_path: Path, is_long: bool
) -> None:
    rng = random.Random(3)
    size_bytes = large_path.stat().st_size
    flips = (
        (rng.randrange(size_bytes), 1 << rng.randrange(8) if single_bit else rng.randrange(1, 256))
        for _ in range(1000 if is_long else 250)
    )
    assert undetected(large_path, maker, flips) == []
