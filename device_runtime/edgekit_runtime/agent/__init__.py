"""The fleet's agent: brings this device to the state its manager wants, and reports its actual state."""
