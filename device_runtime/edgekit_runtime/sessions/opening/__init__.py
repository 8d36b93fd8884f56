"""The first opening of a package on a machine, in a process that may die of it."""
