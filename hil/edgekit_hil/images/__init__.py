"""ARM64 systems made from Debian's packages: a folder to run programs in, and a machine that boots."""
