"""Imports all modules of a folder, for example to register what they define."""

import importlib
import pkgutil
from types import ModuleType


def import_modules(package: ModuleType) -> list[ModuleType]:
    """Import and return the modules and packages directly in `package`, in the order of their names."""
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"{package.__name__}.{name}") for name in names]
