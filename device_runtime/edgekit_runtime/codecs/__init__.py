"""Codecs for sending data to a server: compression of bodies, and media. The libraries are optional."""
