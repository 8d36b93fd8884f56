"""An onnxruntime that says it has a GPU: its sessions run on the processor, or fail as a GPU's may."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import onnxruntime
import pytest

CPU, CUDA, TENSORRT = "CPUExecutionProvider", "CUDAExecutionProvider", "TensorrtExecutionProvider"
GpuState: TypeAlias = Literal["works", "no device", "no libraries", "wrong results", "no memory"]


class _Skewed:
    """The compiled session under a public one, with other results."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def run(self, *arguments: Any) -> list[Any]:
        return [value + 1 for value in self._session.run(*arguments)]


def give_gpu(monkeypatch: pytest.MonkeyPatch, state: GpuState = "works") -> list[Mapping[str, Any]]:
    """Put the stand-in in place; returns the options of each provider of each session, as they are opened."""
    real, opened = onnxruntime.InferenceSession, list[Mapping[str, Any]]()

    class Session(real):  # type: ignore[misc, valid-type]
        def __init__(self, model: Any, settings: Any = None, *, providers: Any, **more: Any) -> None:
            stated = {
                p if isinstance(p, str) else p[0]: {} if isinstance(p, str) else p[1] for p in providers
            }
            opened.append(stated)
            if CUDA in stated and state == "no device":
                raise RuntimeError("CUDA failure 100: no CUDA-capable device is detected")
            if CUDA in stated and state == "no memory" and isinstance(model, str):
                raise RuntimeError("CUDA failure 2: out of memory")
            super().__init__(model, settings, providers=[CPU], **more)
            self.stated = [CPU] if state == "no libraries" else list(stated)
            if CUDA in stated and state == "wrong results":
                self._sess = _Skewed(self._sess)

        def get_providers(self) -> list[str]:
            return self.stated

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [TENSORRT, CUDA, CPU])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    return opened
