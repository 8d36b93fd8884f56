"""A new version beside the one in use: canary, shadow, and the gates that decide."""
