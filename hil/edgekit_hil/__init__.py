"""Hardware in the loop: benches, emulated and real, the tests that run on them, and their evidence."""
