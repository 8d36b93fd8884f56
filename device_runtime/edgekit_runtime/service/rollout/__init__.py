"""Rollouts of new versions by canary or shadow, and the gates that decide on promotion."""
