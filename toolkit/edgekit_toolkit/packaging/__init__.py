"""Builds and signs packages, and writes the recipes to build them again."""
