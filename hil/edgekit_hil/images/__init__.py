"""ARM64 systems from Debian packages: a folder to run programs in, and a machine that boots."""
