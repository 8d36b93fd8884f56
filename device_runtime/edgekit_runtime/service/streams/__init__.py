"""Streams, in which a model answers the newest frame or sound of a source and sends the answers to sinks."""
