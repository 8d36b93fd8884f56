"""How small coded files of packages are, beside xz -9, and how fast they are coded and decoded.

    scripts/python benchmarks/coded_files.py                  models/tiny and ../shared/models, 2 minutes
    scripts/python benchmarks/coded_files.py --damaged 100000 decode damaged and random files, 2 to 4 minutes

Weights are int8 with a scale a channel, as `edgekit package` stores them; then in coarser steps, which leave
2.5 bits of entropy a weight: here that loses accuracy, and is for the size alone. Times are of the processor.
"""

import hashlib
import io
import lzma
import resource
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from edgekit_host.transport.package_encoder import encode
from edgekit_runtime.agent.artifacts.deltas import MAGIC, apply_delta
from edgekit_runtime.errors import PackageError
from edgekit_toolkit.packaging.plain_package import write_plain_package
from edgekit_toolkit.packaging.signing_keys import generate_key, load_signer
from edgekit_toolkit.quantize.forms import INT8_WEIGHTS, Form, build
from graphs import GraphBuilder
from results import make_parser, print_head, print_row, write_json

ROOT = Path(__file__).resolve().parents[1]
BITS = 2.5


def list_codes(model: onnx.ModelProto) -> Iterator[tuple[onnx.NodeProto, NDArray[np.int8]]]:
    """Yield the nodes that widen weights, and the codes of these."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        codes = tensors.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if codes is not None and codes.data_type == onnx.TensorProto.INT8:
            yield node, numpy_helper.to_array(codes)


def count_entropy_bytes(tensors: list[NDArray[np.int8]]) -> float:
    """Return the entropy of all codes, where each tensor has its own frequencies, which are free."""
    size = 0.0
    for tensor in tensors:
        counts = np.bincount(tensor.ravel().astype(np.int16) + 128)
        counts = counts[counts > 0]
        size -= float((counts * np.log2(counts / tensor.size)).sum()) / 8
    return size


def coarsen(model: onnx.ModelProto, bits: float) -> None:
    """Divide codes by the number that leaves `bits` of entropy a weight, and multiply their scales by it."""
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = list(list_codes(model))
    weights = sum(codes.size for _, codes in nodes)
    divisors = np.geomspace(1, 127, 200)
    sizes = [count_entropy_bytes([np.rint(codes / divisor) for _, codes in nodes]) for divisor in divisors]
    divisor = divisors[np.argmin(np.abs(8 * np.array(sizes) / weights - bits))]
    for node, codes in nodes:
        name, scale = node.input[:2]
        coarse = np.rint(codes / divisor).astype(np.int8)
        tensors[name].CopyFrom(numpy_helper.from_array(coarse, name))
        scales = (numpy_helper.to_array(tensors[scale]) * divisor).astype(np.float32)
        tensors[scale].CopyFrom(numpy_helper.from_array(scales, scale))


def make_package(name: str, model: onnx.ModelProto, folder: Path) -> bytes:
    source = folder / "source.onnx"
    onnx.save(model, source)
    sign = load_signer("benchmark", folder / "keys")
    return write_plain_package(source, name=name, target="x86-64", folder=folder, sign=sign).read_bytes()


def measure(name: str, model: onnx.ModelProto, folder: Path) -> dict[str, object]:
    """Package a model, code the package, decode it, and return the figures."""
    package = make_package(name, model, folder)
    started_s = time.process_time()
    content = encode(b"", package) or b""
    encode_s = time.process_time() - started_s
    started_s = time.process_time()
    apply_delta(
        *(io.BytesIO(content), b"", folder / "decoded"),
        size_bytes=len(package),
        sha256=hashlib.sha256(package).hexdigest(),
        stop=threading.Event(),
    )
    decode_s = time.process_time() - started_s
    tensors = [codes for _, codes in list_codes(model)]
    return {
        "model": name,
        "weights": sum(tensor.size for tensor in tensors),
        "entropy_bytes": round(count_entropy_bytes(tensors)),
        "package_bytes": len(package),
        "xz_bytes": len(lzma.compress(package, preset=9)),
        "coded_bytes": len(content),
        "encode_s": encode_s,
        "decode_s": decode_s,
    }


def damage(content: bytes, rng: np.random.Generator) -> bytes:
    """Return a coded file with some bytes changed, cut off, repeated or drawn."""
    data = bytearray(content)
    kind = rng.integers(4)
    if kind == 0:
        for position in rng.integers(len(MAGIC), len(data), rng.integers(1, 4)):
            data[position] = rng.integers(256)
    elif kind == 1:  # the head, which states sizes
        data[rng.integers(len(MAGIC), 40)] = rng.integers(256)
    elif kind == 2:
        begin, end = sorted(rng.integers(len(MAGIC), len(data), 2))
        data[begin:end] = data[begin:end] * int(rng.integers(3))
    else:
        data = bytearray(MAGIC) + bytearray(rng.bytes(rng.integers(200)))
    return bytes(data)


def make_small_package(folder: Path) -> bytes:
    """Return a package of one layer of int8 weights, whose coded file has codes, biases and noise."""
    rng = np.random.default_rng(0)
    graph = GraphBuilder()
    weights, biases = (graph.weight(rng.normal(0, 0.1, shape).astype(np.float32)) for shape in ((64, 10), 10))
    y = graph.add("Gemm", ["x", weights, biases])
    model = build(graph.model({"x": [1, 64]}, {y: [1, 10]}), Form(INT8_WEIGHTS))
    assert model is not None
    coarsen(model, BITS)
    return make_package("x", model, folder)


def decode_damaged(count: int, seed: int, folder: Path) -> dict[str, object]:
    """Decode damaged files of a small package; return outcomes, worst time and growth of memory.

    Raises:
        AssertionError: a file other than the signed package came out, or anything lies there after an error.
    """
    package, result = make_small_package(folder), folder / "decoded"
    content, sha256 = encode(b"", package) or b"", hashlib.sha256(package).hexdigest()
    rng, outcomes, worst_s = np.random.default_rng(seed), Counter[str](), 0.0
    begin_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    while outcomes.total() < count:
        damaged = damage(content, rng)
        if damaged == content:
            continue
        started_s = time.process_time()
        try:
            apply_delta(
                *(io.BytesIO(damaged), b"", result),
                size_bytes=len(package),
                sha256=sha256,
                stop=threading.Event(),
            )
        except PackageError as error:
            outcome = type(error).__name__
            assert not result.exists()
        else:
            outcome = "same package"
            assert result.read_bytes() == package
            result.unlink()
        worst_s = max(worst_s, time.process_time() - started_s)
        outcomes[outcome] += 1
    grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - begin_kib
    return {"coded_bytes": len(content), **outcomes, "worst_s": worst_s, "memory_grown_kib": grown_kib}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--damaged", type=int, metavar="N", help="decode N damaged files instead")
    parser.add_argument("--seed", type=int, default=0, help="of the damage")
    parser.add_argument("--models", type=Path, default=ROOT.parent / "shared" / "models" / "models")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.damaged:
        with tempfile.TemporaryDirectory() as temporary:
            generate_key("benchmark", Path(temporary) / "keys")
            print(decode_damaged(arguments.damaged, arguments.seed, Path(temporary)))
        return
    rows = []
    print_head("model", "weights", "bits", "their entropy", "package", "xz -9", "coded", "code s", "decode s")
    paths = [*sorted((ROOT / "models" / "tiny").glob("*.onnx")), *sorted(arguments.models.glob("*.onnx"))]
    for path in paths:
        for bits in (None, BITS):
            model = build(onnx.load(path), Form(INT8_WEIGHTS))
            if model is None:
                continue
            if bits is not None:
                coarsen(model, bits)
            with tempfile.TemporaryDirectory() as temporary:
                generate_key("benchmark", Path(temporary) / "keys")
                row = measure(path.stem.replace("_fp32", ""), model, Path(temporary))
            rows.append(row)
            counts = [
                f"{row[key]:,}" for key in ("entropy_bytes", "package_bytes", "xz_bytes", "coded_bytes")
            ]
            times = [f"{row[key]:.2f}" for key in ("encode_s", "decode_s")]
            print_row(row["model"], f"{row['weights']:,}", bits or "int8", *counts, *times)
    write_json(arguments.json, rows)


if __name__ == "__main__":
    main()
