"""Shows evidence as a page with plots; it changes and measures nothing."""
