"""Shows evidence as an HTML page with plots."""
