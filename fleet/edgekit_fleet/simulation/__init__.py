"""Thousands of simulated devices in one process, for tests, benchmarks and the demo."""
