"""Modelled latency and energy of a network on a target, for early choices; no replacement for measurements.

Each kernel takes the longer of its arithmetic and its memory traffic, plus a fixed start; kernels run one
after another. Caches, overlap and thermal throttling are not modelled, which is why a result carries a range.

Source: S. Williams et al., Roofline: an insightful visual performance model for multicore architectures,
CACM 52(4), 2009, section 3 (the bound of one kernel).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from edgekit_toolkit.targets.spec import PowerMode, Precision, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """Arithmetic and memory traffic of one kernel, on any device.

    Attributes:
        name: the node's name; without a name, the name of its first output.
        bytes_read: bytes of activations read.
        bytes_written: bytes of activations written.
        weight_bytes: bytes of constants read.
        repeats: number of runs in one inference, as in a loop; the other figures are for one run.
        steps: steps of a recurrent layer, each of which waits for the one before; a GPU starts a kernel for
            each.
    """

    name: str
    op: str
    macs: int
    bytes_read: int
    bytes_written: int
    weight_bytes: int
    precision: Precision
    repeats: int = 1
    steps: int = 1

    def __post_init__(self) -> None:
        for field in ("macs", "bytes_read", "bytes_written", "weight_bytes"):
            if getattr(self, field) < 0:
                raise ValueError(f"{self.name}: {field}: expected at least 0, got {getattr(self, field)}")

    @property
    def traffic_bytes(self) -> int:
        """All bytes that one run of the kernel reads and writes, constants included."""
        return self.bytes_read + self.bytes_written + self.weight_bytes


@dataclass(frozen=True, slots=True)
class ModelledCost:
    """A modelled latency and energy of one inference.

    Attributes:
        energy_j: energy of the whole board, idle draw included.
    """

    latency_s: float
    energy_j: float


def kernel_latency_s(node: NodeCost, target: Target, mode: PowerMode) -> float:
    """Return the modelled seconds of all runs of one kernel in an inference on `target` in `mode`."""
    arithmetic_s = node.macs / (target.costs.macs_per_s(node.precision) * mode.compute_scale.value)
    transfer_s = node.traffic_bytes / (target.costs.memory.value * mode.bandwidth_scale.value)
    starts = node.steps if target.backend.on_gpu else 1
    return node.repeats * (max(arithmetic_s, transfer_s) + starts * target.costs.kernel_overhead.value)


def model_cost(nodes: Sequence[NodeCost], target: Target, power_mode: str | None = None) -> ModelledCost:
    """Return the modelled latency and energy of one inference.

    Args:
        nodes: the kernels, from `edgekit_toolkit.costs.onnx_operators.node_costs`.
        target: target on whose default backend the kernels run.
        power_mode: name of a power mode of the target; by default its default mode.

    Raises:
        TargetError: the target has no such power mode.
    """
    mode = target.power.mode(power_mode or target.power.default_mode)
    latency_s = sum(kernel_latency_s(node, target, mode) for node in nodes)
    return ModelledCost(latency_s, energy_j=mode.active.value * latency_s)
