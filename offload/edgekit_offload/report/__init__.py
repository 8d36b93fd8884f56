"""Reports of a plan: an HTML page without scripts, and a chart for the terminal."""
