"""The agent of the fleet: brings this device to what its manager wants, and reports what is true here."""
