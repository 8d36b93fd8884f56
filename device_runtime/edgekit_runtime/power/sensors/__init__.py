"""Sensors of power, heat, battery and clock: one kind of sensor a file."""
