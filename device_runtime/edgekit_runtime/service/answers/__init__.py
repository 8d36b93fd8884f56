"""Converts images and sound to answers. Decoding runs on threads."""
