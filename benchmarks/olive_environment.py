"""The environment in which Olive runs.

It is apart from the project's because Olive brings torch (several GB with its GPU libraries) and needs an
older pydantic.
"""

import telemetry_off  # noqa: F401

from pathlib import Path

import onnxruntime

from environments import make_environment

PACKAGES = (
    "olive-ai==0.13.*",
    "pydantic<2.12",  # Olive 0.13 fails to import with newer ones
    "requests",  # Olive imports it without declaring it
    f"onnxruntime=={onnxruntime.__version__}",  # the quantizer that Olive calls: the same for both
)


def olive_python() -> Path | None:
    """The interpreter of Olive's environment, made on first use; None where pip cannot make it."""
    return make_environment("olive", PACKAGES, "6 GB")
