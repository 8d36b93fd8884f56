"""Shared parts of the host packages: pages, plots, evidence, emulation, terminal and pinned packages."""
