"""Photographs and sound as samples of a model: finds and decodes files, applies the preprocessing."""
