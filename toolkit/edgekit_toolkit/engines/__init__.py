"""How packages are made for each engine, a module each; importing one registers its record."""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
