"""One run of `edgekit package`: the order of its phases, and what passes between them."""
