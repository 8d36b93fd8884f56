"""Offloading: a model that runs on this device, on a server, or split between both, as measurements say."""
