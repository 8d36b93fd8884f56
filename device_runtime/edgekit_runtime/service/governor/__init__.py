"""The seam between the service and the power governor."""
