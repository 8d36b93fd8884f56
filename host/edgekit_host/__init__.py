"""What all parts of the host side share: pages, plots, evidence, emulation, terminal, pinned packages."""
