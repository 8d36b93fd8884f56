"""Reports of a plan: one HTML page without script, and a chart for the terminal."""
