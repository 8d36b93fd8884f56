"""Encrypted packages with weights that can be searched for, and devices that have a key."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from tests.runtime.conftest import CODES, OFFSET, SCALE, PackageMaker

from edgekit_runtime.encryption.container import encrypt_file, make_content_key
from edgekit_runtime.encryption.device_key import DeviceKey, make_device_key, wrap_for
from edgekit_runtime.encryption.opening import write_key_file

WINDOW_BYTES = 32


def make_heavy(maker: PackageMaker, hidden: int = 1024) -> tuple[PackageMaker, bytes]:
    """Return a maker of packages `linear` with random weights, and these weights."""
    random = np.random.default_rng(7)
    first = random.standard_normal((4, hidden)).astype(np.float32)
    second = random.standard_normal((hidden, 2)).astype(np.float32)
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "a"], ["h"]), helper.make_node("MatMul", ["h", "b"], ["y"])],
        "linear",
        [helper.make_tensor_value_info("x", float32, ["N", 4])],
        [helper.make_tensor_value_info("y", float32, ["N", 2])],
        [onnx.numpy_helper.from_array(first, "a"), onnx.numpy_helper.from_array(second, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    values = CODES.astype(np.float32) * np.float32(SCALE) + np.float32(OFFSET)
    artifacts = {
        **maker.artifacts,
        "model.onnx": model.SerializeToString(),
        "golden/y.bin": (values @ first @ second).tobytes(),
    }
    return dataclasses.replace(maker, artifacts=artifacts), first.tobytes() + second.tobytes()


def encrypt_package(source: Path, target: Path, device: DeviceKey, *, beside: bool = False) -> None:
    """Encrypt a package for a device; with `beside` its key lies in the file that an agent writes."""
    content_key = make_content_key()
    recipients = wrap_for(content_key, [device.public_key])
    encrypt_file(source, target, content_key, {} if beside else recipients)
    if beside:
        write_key_file(target, content_key.key_id, recipients[device.key_id])


def make_device(home: Path) -> DeviceKey:
    """Make the key of a device with $EDGEKIT_HOME at `home`."""
    return make_device_key(home / "keys", holder="file")


def find_plaintext(folder: Path, secret: bytes, checked: set[bytes] | None = None) -> list[tuple[Path, int]]:
    """Return files below `folder` that hold any 32 bytes of `secret`, and where.

    `checked`: contents without any, which are not searched again.
    """
    windows = {secret[at : at + WINDOW_BYTES] for at in range(len(secret) - WINDOW_BYTES + 1)}
    return list(_find_windows(folder, windows, set() if checked is None else checked))


def _find_windows(folder: Path, windows: set[bytes], checked: set[bytes]) -> Iterator[tuple[Path, int]]:
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        content = path.read_bytes()
        if content in checked:
            continue
        checked.add(content)
        for at in range(len(content) - WINDOW_BYTES + 1):
            if content[at : at + WINDOW_BYTES] in windows:
                yield path, at
                break
