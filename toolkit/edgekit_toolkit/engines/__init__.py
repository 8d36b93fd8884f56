"""How packages are made for each engine. Importing a module registers the record of its engine."""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
