"""The console: pages for people at a screen, rendered on the server."""
