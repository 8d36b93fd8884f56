"""One run of `edgekit package`: the order of its phases, and the data between them."""
