"""The records of the engines, one module each.

Importing a module registers its record, but does not import the engine. `edgekit_runtime` imports this
package, so that every process knows all engines.
"""

import sys

from edgekit_runtime.system.folder_modules import import_modules

import_modules(sys.modules[__name__])
