"""The manager: reads the reports of devices and publishes their desired versions."""
