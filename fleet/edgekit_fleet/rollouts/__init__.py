"""Rollouts: who gets a release and when, when it stops, and why. Mostly pure decisions."""
