"""The records of our engines, a module each; importing one registers it and imports no engine.

`edgekit_runtime` imports this package, so the table is complete in every process of ours.
"""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
