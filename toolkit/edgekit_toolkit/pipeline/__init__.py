"""The phases of `edgekit package`, and the data that they exchange."""
