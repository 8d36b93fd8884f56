"""Memory and load, measured on this machine."""
