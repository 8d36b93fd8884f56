"""Models the latency and energy of a network on a target. This does not replace measurements.

The time of a kernel is a fixed overhead plus the longer of its arithmetic and its memory traffic. Kernels run
one after another. Caches, overlap and thermal throttling are not modelled, so results have an uncertainty.

Source: S. Williams et al., Roofline: an insightful visual performance model for multicore architectures, CACM
52(4), 2009, section 3 (the bound of one kernel).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from edgekit_toolkit.targets.spec import PowerMode, Precision, Target


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCost:
    """The arithmetic and memory traffic of one kernel, on any device.

    Attributes:
        name: The name of the node, or of its first output if the node has no name.
        bytes_read: The bytes of activations read.
        bytes_written: The bytes of activations written.
        weight_bytes: The bytes of constants read.
        repeats: The number of runs in one inference, as in a loop. The other figures are for one run.
        steps: The number of sequential steps of a recurrent layer. A GPU starts a kernel for each step.
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
        """The number of bytes that one run of the kernel reads and writes, including constants."""
        return self.bytes_read + self.bytes_written + self.weight_bytes


@dataclass(frozen=True, slots=True)
class ModelledCost:
    """The modelled latency and energy of one inference.

    Attributes:
        energy_j: The energy of the whole board, including its idle power.
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
        nodes: The kernels, from `edgekit_toolkit.costs.onnx_operators.node_costs`.
        target: The target, on whose default backend the kernels run.
        power_mode: The name of a power mode of the target. The default is its default mode.

    Raises:
        TargetError: The target has no such power mode.
    """
    mode = target.power.mode(power_mode or target.power.default_mode)
    latency_s = sum(kernel_latency_s(node, target, mode) for node in nodes)
    return ModelledCost(latency_s, energy_j=mode.active.value * latency_s)
