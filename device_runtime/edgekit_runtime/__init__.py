"""What runs on the device: reading and verifying packages, sessions and their backends.

It does not convert, quantize or measure models (see `edgekit_toolkit`), and imports none of the other
edgekit packages, so that a device installs nothing that it does not run.
"""

__version__ = "0.1.0"
