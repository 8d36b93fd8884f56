"""Results of a run on a bench, as a file that can be committed."""
