"""Who may do what: users, their logins, and tokens for programs."""
