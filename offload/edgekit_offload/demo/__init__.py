"""A demo of offloading between a slow device and a server over a changing link, all on one machine."""
