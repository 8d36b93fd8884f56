"""Environment files of the benches, opening one, and what the tests say to its device."""
