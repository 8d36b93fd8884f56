"""The tasks, with one module for each. Importing this package registers all tasks."""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
