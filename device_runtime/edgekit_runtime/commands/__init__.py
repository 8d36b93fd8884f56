"""The commands of `edgekit-device`, one file each. A command imports its modules when it runs."""
