"""Setting up a device over ssh: runtime, keys, units of systemd, enrolment. The device needs no network."""
