"""Rollouts: which devices get a release and when, when it stops, and why. Mostly pure decisions."""
