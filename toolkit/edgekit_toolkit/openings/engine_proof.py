"""What the release of an engine that devices run said about a package."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineProof:
    """What a release of the engine said about a package.

    Attributes:
        engine: name and release of the engine that proved it, such as `onnxruntime 1.24.4`.
        device_engine: name and release that devices run.
        problem: why the device's release refuses the package, or an empty text.
        note: why only the host's release proved it, or an empty text.
    """

    engine: str
    device_engine: str
    problem: str = ""
    note: str = ""
