"""Photographs and sound as samples of a model: find the files, decode them, apply the preprocessing."""
