"""Messages between the service and its worker processes."""
