"""The package report: an HTML page, its JSON document and a summary for the terminal.

It renders the results of the pipeline and decides nothing itself.
"""
