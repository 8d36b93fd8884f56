"""Selects and stores the requests that the fleet orders as samples."""
