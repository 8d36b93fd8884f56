"""The endpoints of the service: which URL does what."""
