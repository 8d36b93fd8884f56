"""Hardware in the loop: real and emulated benches, the tests that run on them, and their evidence."""
