"""Codecs of what a device sends to a server: compression of bodies, and media. The libraries are optional."""
