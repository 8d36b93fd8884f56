"""Codecs for data that is sent to a server: compression and media. The libraries are optional."""
