"""Hardware in the loop: benches (emulated and real devices), the tests that run on them, and the evidence they leave."""
