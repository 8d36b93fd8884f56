"""Plots of a report as inline SVG."""
