"""The HTTP interface. Its routes, OpenAPI document and client are all built from one table of endpoints."""
