"""Reads data sets with bounding boxes, in several formats."""
