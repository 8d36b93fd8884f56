"""Models of all formats behind the protocol `Model`."""
