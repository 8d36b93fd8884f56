"""The manager: takes in what devices state, and publishes what they shall run."""
