"""How packages are made for each engine, a module each; importing one registers its record."""

from edgekit_toolkit.engines import litert, ort, tensorrt

__all__ = ["litert", "ort", "tensorrt"]
