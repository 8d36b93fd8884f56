"""Rollouts: which devices get a release and when, and when and why a rollout stops."""
