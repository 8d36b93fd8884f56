"""Extracts the two halves of a cut as models of their own, with the coding of what is sent inside both."""
