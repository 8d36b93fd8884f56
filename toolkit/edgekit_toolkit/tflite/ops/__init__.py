"""The supported operators, in one file per family."""

import sys

from edgekit_runtime.system.folder_modules import import_modules
from edgekit_toolkit.tflite.registry import OPERATORS

__all__ = ["OPERATORS"]

import_modules(sys.modules[__name__])
