"""Signatures of packages and the public keys that a device trusts."""
