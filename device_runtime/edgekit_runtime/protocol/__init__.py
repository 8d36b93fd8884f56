"""The Open Inference Protocol v2 in bytes and numpy arrays, without sockets: client and service share it."""
