"""The console: web pages that are rendered on the server."""
