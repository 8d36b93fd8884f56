"""The tasks, a module each; importing this package registers all of them."""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
