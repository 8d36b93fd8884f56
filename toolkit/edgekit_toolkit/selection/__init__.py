"""The choice of a candidate under a budget. Pure: no clock, no file."""
