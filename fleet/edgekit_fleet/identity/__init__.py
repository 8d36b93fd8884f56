"""Identities: the authority, its certificates, one-time codes, revocation."""
