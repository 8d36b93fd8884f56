"""Identities: the certificate authority, certificates, one-time codes, and revocation."""
