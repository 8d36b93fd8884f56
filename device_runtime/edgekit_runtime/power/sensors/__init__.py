"""Sensors of power, heat, battery and clock. Each file implements one kind of sensor."""
