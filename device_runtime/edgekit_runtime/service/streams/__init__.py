"""Streams. A model processes the newest frame or sound of a source, and the answers are sent to sinks."""
