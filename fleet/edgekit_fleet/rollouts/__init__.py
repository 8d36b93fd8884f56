"""Rollouts: the order in which devices get a release, and the decisions to continue or stop."""
