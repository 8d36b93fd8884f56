"""Plans how to run a model on device and server, based on measured costs."""
