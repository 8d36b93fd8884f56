"""The inference service of a device, which serves the Open Inference Protocol v2 over a Unix socket and TCP.

It loads the packages that are installed in slots. Engines are imported only when a model needs them.
"""
