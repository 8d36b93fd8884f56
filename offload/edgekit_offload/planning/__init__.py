"""Plans: the candidates to run a model on device and server that are best somewhere, from measured costs."""
