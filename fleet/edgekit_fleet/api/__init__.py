"""The HTTP interface: one table of endpoints, from which come routes, OpenAPI and the client."""
