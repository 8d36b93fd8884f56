"""Fit the throughput of a target to published latencies, and say how well the fit predicts others.

    python benchmarks/target_fit.py

For each published pair the throughput is chosen so that the modelled latency of the first network equals the
published one; the second network is then a prediction. The target files cite these fits
(docs/reference/targets.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx

from edgekit_toolkit.costs.onnx_operators import node_costs
from edgekit_toolkit.costs.target_model import NodeCost
from edgekit_toolkit.targets.spec import Precision
from graphs import GraphBuilder

# MobileNet v1, table 1: stride and output channels of each depthwise separable block.
_V1 = [(1, 64), (2, 128), (1, 128), (2, 256), (1, 256), (2, 512), *[(1, 512)] * 5, (2, 1024), (1, 1024)]
# MobileNet v2, table 2: expansion, output channels, repeats, stride.
_V2 = [
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1),
]  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Latencies of MobileNet v1 and v2 1.0 224 in one report, and what is assumed beside the throughput."""

    device: str
    precision: Precision
    v1_ms: float
    v2_ms: float | None
    memory_bytes_per_s: float
    kernel_overhead_s: float


# XNNPACK README, Raspberry Pi table of 2022-02-08; TensorFlow Lite performance measurement page, 4 threads.
PUBLISHED = [
    Published("Raspberry Pi 3+, 1.4 GHz", "fp32", 114, 79, 2.0e9, 20e-6),
    Published("Raspberry Pi 3+, 1.4 GHz", "int8", 46, 30, 2.0e9, 20e-6),
    Published("Raspberry Pi 4 arm64, 1.5 GHz", "fp32", 77, 46, 5.5e9, 10e-6),
    Published("Raspberry Pi 4 arm64, 1.5 GHz", "int8", 24, 17, 5.5e9, 10e-6),
    Published("Pixel 4", "fp32", 14.0, None, 15e9, 5e-6),
    Published("Pixel 4", "int8", 5.0, None, 15e9, 5e-6),
]


def conv(
    build: GraphBuilder, x: str, ins: int, outs: int, kernel: int, stride: int = 1, *, group: int = 1
) -> str:
    """Add a convolution; its weights are zero, since only shapes count."""
    weight = build.weight(np.zeros((outs, ins // group, kernel, kernel), np.float32))
    return build.add("Conv", [x, weight], group=group, strides=[stride] * 2, pads=[kernel // 2] * 4)


def clipped(build: GraphBuilder, x: str, *sizes: int, group: int = 1) -> str:
    return build.add("Relu", [conv(build, x, *sizes, group=group)])


def pooled(build: GraphBuilder, x: str) -> onnx.ModelProto:
    return build.model({"x": [1, 3, 224, 224]}, {build.add("GlobalAveragePool", [x]): None})


def mobilenet_v1() -> onnx.ModelProto:
    build, ins = GraphBuilder(), 32
    x = clipped(build, "x", 3, ins, 3, 2)
    for stride, outs in _V1:
        x = clipped(build, x, ins, ins, 3, stride, group=ins)
        x = clipped(build, x, ins, outs, 1)
        ins = outs
    return pooled(build, x)


def mobilenet_v2() -> onnx.ModelProto:
    build, ins = GraphBuilder(), 32
    x = clipped(build, "x", 3, ins, 3, 2)
    for expansion, outs, repeats, first_stride in _V2:
        for repeat in range(repeats):
            shortcut, stride, width = x, 1 if repeat else first_stride, ins * expansion
            if expansion > 1:
                x = clipped(build, x, ins, width, 1)
            x = clipped(build, x, width, width, 3, stride, group=width)
            x = conv(build, x, width, outs, 1)
            if repeat:
                x = build.add("Add", [shortcut, x])
            ins = outs
    return pooled(build, clipped(build, x, ins, 1280, 1))


def quantized(nodes: Sequence[NodeCost]) -> list[NodeCost]:
    """The same kernels in int8: a quarter of the bytes."""
    return [
        replace(
            node,
            bytes_read=node.bytes_read // 4,
            bytes_written=node.bytes_written // 4,
            weight_bytes=node.weight_bytes // 4,
            precision="int8",
        )
        for node in nodes
    ]


def latency_s(nodes: Sequence[NodeCost], macs_per_s: float, case: Published) -> float:
    return sum(
        max(node.macs / macs_per_s, node.traffic_bytes / case.memory_bytes_per_s) + case.kernel_overhead_s
        for node in nodes
    )


def fit(nodes: Sequence[NodeCost], case: Published) -> float:
    """Throughput at which `nodes` take the published time (bisection in the logarithm)."""
    low, high = 1e8, 1e14
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if latency_s(nodes, middle, case) > case.v1_ms / 1e3 else (low, middle)
    return low


def main() -> None:
    v1, v2 = node_costs(mobilenet_v1()), node_costs(mobilenet_v2())
    for name, nodes in (("v1", v1), ("v2", v2)):
        print(f"MobileNet {name}: {sum(node.macs for node in nodes) / 1e6:.0f} M MACs, {len(nodes)} kernels")
    for case in PUBLISHED:
        first, second = (quantized(v1), quantized(v2)) if case.precision == "int8" else (v1, v2)
        macs_per_s = fit(first, case)
        line = f"{case.device} {case.precision}: {macs_per_s / 1e9:.1f} G MAC/s"
        if case.v2_ms is not None:
            predicted_ms = latency_s(second, macs_per_s, case) * 1e3
            line += f"; v2 predicted {predicted_ms:.1f} ms, published {case.v2_ms} ms"
            line += f" ({predicted_ms / case.v2_ms:.2f}x)"
        print(line)


if __name__ == "__main__":
    main()
