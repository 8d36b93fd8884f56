"""In which order of axes each tensor is held."""
