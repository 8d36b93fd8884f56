"""A plan for people: one HTML page without script, and a chart for the terminal."""
