"""Samples from the field: requests that the fleet ordered are drawn, looked at and stored."""
