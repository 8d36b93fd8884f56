"""What a run has seen on a bench, as a file that can be committed."""
