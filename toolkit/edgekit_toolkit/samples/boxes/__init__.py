"""Data sets of boxes as they lie on disks: a module for each format, which `box_set` finds."""
