"""Offloading: runs a model on this device, on a server, or split between both, depending on measurements."""
