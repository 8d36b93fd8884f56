"""The inference service of a device: Open Inference Protocol v2 over a Unix socket and TCP.

It loads packages that are installed in slots, and imports no engine before a model needs it.
"""
