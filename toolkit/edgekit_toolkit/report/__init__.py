"""The package report: an HTML page, its JSON document and a summary for the terminal.

Renders what the pipeline found and decides nothing itself.
"""
