"""Plans: the ways to run a model on device and server that are best somewhere, from measured costs."""
