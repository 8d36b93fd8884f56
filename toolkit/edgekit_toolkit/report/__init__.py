"""The package report: an HTML page, a JSON document and a summary for the terminal."""
