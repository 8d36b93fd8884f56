"""Extracts the two halves of a cut as models; both contain their part of the coding of sent tensors."""
