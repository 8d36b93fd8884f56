"""Statistics that stay valid when they are evaluated repeatedly, for canaries and rollout gates."""
