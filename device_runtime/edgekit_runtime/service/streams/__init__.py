"""Streams: a source of frames or sound, a model that answers each newest one, and sinks for the answers."""
