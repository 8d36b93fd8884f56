"""The HTML page of a report, section by section."""
