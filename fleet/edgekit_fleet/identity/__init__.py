"""Who is who: the authority, its certificates, one-time codes, revocation."""
