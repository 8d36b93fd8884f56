"""What the HTTP interface offers: endpoints by noun, and the table of all."""
