"""Plans: which ways to run a model between device and server are best somewhere, from measured costs."""
