"""Tests that run on a bench: `pytest hil`, or `edgekit hil run`. Tests of our code are in tests/hil."""
