"""Access control: users, their logins, and tokens for programs."""
