"""The pages of rollouts, and the data that they show."""
