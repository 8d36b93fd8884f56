"""The agent of a fleet: it brings this device to the desired state, and reports the actual state."""
