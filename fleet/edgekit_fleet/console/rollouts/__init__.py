"""The pages of rollouts, and what they show."""
