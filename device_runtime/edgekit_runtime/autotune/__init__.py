"""Which engine and which options run a package fastest on this device: tournament and tuning."""
