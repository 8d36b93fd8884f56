"""Sets up a device over ssh: runtime, keys, systemd units and enrolment. The device needs no internet."""
