"""Tournament and tuning: find the engine and the options that run a package fastest on this device."""
